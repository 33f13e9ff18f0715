"""Checks that node 0 has memory for the processes of its engines, before any of these is started."""

from __future__ import annotations

from typing import Final

from stoker_common.errors import ArgumentError
from stoker_common.subprocesses.host_memory import host_memory
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.nodes.placement import RankPlacement

#: Minimum host memory of a compute process (Python and torch) for any model and device, in bytes.
PROCESS_BYTES: Final = 256 << 20


def check_memory(args: EngineArgs) -> None:
    """Refuse to start more engines than this machine's memory, that of node 0, permits even without a model. A single
    engine is not refused. Of an engine that spans several nodes only the ranks on this one count.

    Raises:
        ArgumentError: there are too many engines; the message names the number that fits.
    """
    placement = RankPlacement.of(args)
    processes, _ = placement.neighbours(engine=0, rank=0)
    engines = -(-processes // placement.size)
    max_processes = host_memory() // PROCESS_BYTES
    if engines > 1 and processes > max_processes:
        raise ArgumentError(
            "--data-parallel-size",
            f"{engines} engines on one machine are {processes} processes with at least {PROCESS_BYTES >> 20} MiB "
            f"each, and its memory has room for {max(1, max_processes // placement.size)} engines; reduce the number",
        )
