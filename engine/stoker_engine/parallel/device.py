"""Which device this process computes on, and how much of it: memory, and processors."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from stoker_common.errors import ArgumentError
from stoker_common.subprocesses.host_memory import host_memory
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.parallel.processors import cpu_quota


def resolve_device(args: EngineArgs) -> torch.device:
    """The device for `args`.

    Raises:
        ArgumentError: the device is not there, or more of them are asked than this engine drives.
    """
    name = args.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ArgumentError("--device", "cuda: no CUDA device is visible; use --device cpu")
    return torch.device(name)


def check_devices(device: torch.device, count: int) -> None:
    """Refuses to start more ranks than there are accelerators for.

    Raises:
        ArgumentError: each of `count` ranks that compute on `device` needs one, and this process sees fewer.
    """
    if device.type == "cuda" and (visible := torch.cuda.device_count()) < count:
        raise ArgumentError(
            "--tensor-parallel-size",
            f"{count} ranks need a device each, and {visible} are visible here; ask for fewer ranks, or make more "
            "devices visible",
        )


def use_device(device: torch.device, index: int) -> None:
    """Has this process compute on accelerator number `index` of those it sees.

    Raises:
        ArgumentError: there is none.
    """
    check_devices(device, index + 1)
    if device.type == "cuda":
        torch.cuda.set_device(index)


def memory_bytes(device: torch.device, sharers: int = 1) -> int:
    """Memory of `device`; for the CPU the container's limit, or the machine's memory if that is less.

    Args:
        sharers: ranks of all engines. Each has an accelerator of its own, or its part of the CPU's memory.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return host_memory() // sharers


def limit_threads(limit: int | None = None) -> None:
    """Limits torch's threads to the container's processors, or to `limit`.

    torch starts one for each core of the machine. Where a container's limit is lower, the kernel stops all of them
    for the rest of each period, and every GEMM waits for its slowest thread.

    Args:
        limit: how many this process may use, of several processes that compute at the same time.
    """
    count = usable_threads() if limit is None else min(usable_threads(), limit)
    if count != torch.get_num_threads():
        torch.set_num_threads(count)


def usable_threads() -> int:
    """How many threads torch would use, or fewer: as many as the container has processors."""
    count, quota = torch.get_num_threads(), cpu_quota()
    return count if quota is None else max(1, min(count, math.ceil(quota)))


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Lets torch's operators use `count` threads meanwhile; None changes nothing.

    The CPU's kernels have threads of their own. OpenMP's, which torch uses, stay awake for milliseconds after each
    operator and would take the processors from them.
    """
    before = torch.get_num_threads()
    if count is None or count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
