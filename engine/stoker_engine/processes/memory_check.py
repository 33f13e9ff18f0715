"""Checks that this machine has memory for the processes of its engines, before any of these is started."""

from __future__ import annotations

from typing import Final

from stoker_common.errors import ArgumentError
from stoker_common.subprocesses.host_memory import host_memory
from stoker_engine.contract.engine_args import EngineArgs

#: Minimum host memory of a compute process (Python and torch) for any model and device, in bytes.
PROCESS_BYTES: Final = 256 << 20


def check_memory(args: EngineArgs) -> None:
    """Refuse to start more engines than this machine's memory permits even without a model.

    Raises:
        ArgumentError: there are too many engines; the message names the number that fits.
    """
    ranks = args.tensor_parallel_size * args.pipeline_parallel_size
    engines = -(-args.data_parallel_size // args.nnodes)
    max_engines = max(1, host_memory() // (PROCESS_BYTES * ranks))
    if engines > max_engines:
        raise ArgumentError(
            "--data-parallel-size",
            f"{engines} engines on one machine are {engines * ranks} processes with at least {PROCESS_BYTES >> 20} MiB "
            f"each, and its memory has room for {max_engines} engines; reduce the number",
        )
