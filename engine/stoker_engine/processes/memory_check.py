"""Whether there is room for the processes of all engines, asked before any of them is started."""

from __future__ import annotations

from typing import Final

from stoker_common.errors import ArgumentError
from stoker_common.subprocesses.host_memory import host_memory
from stoker_engine.contract.engine_args import EngineArgs

#: What a process that computes takes of the host's memory, whatever its model and device are: Python and torch.
PROCESS_BYTES: Final = 256 << 20


def check_memory(args: EngineArgs) -> None:
    """Refuses to start more engines than there is memory for, however small the model is.

    Raises:
        ArgumentError: names what there would be room for.
    """
    ranks = args.tensor_parallel_size * args.pipeline_parallel_size
    engines = -(-args.data_parallel_size // args.nnodes)
    max_engines = max(1, host_memory() // (PROCESS_BYTES * ranks))
    if engines > max_engines:
        raise ArgumentError(
            "--data-parallel-size",
            f"{engines} engines on one machine are {engines * ranks} processes, each with at least "
            f"{PROCESS_BYTES >> 20} MiB of its memory, which has room for {max_engines} engines; ask for fewer",
        )
