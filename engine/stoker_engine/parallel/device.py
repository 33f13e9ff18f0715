"""The device that this process computes on, its memory, and torch's number of threads."""

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
    """Return the device that `--device` selects.

    Raises:
        ArgumentError: CUDA is requested, and no CUDA device is visible.
    """
    name = args.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ArgumentError("--device", "cuda: no CUDA device is visible; use --device cpu")
    return torch.device(name)


def check_devices(device: torch.device, count: int) -> None:
    """Check that `count` accelerators are visible, unless `device` is the CPU.

    Raises:
        ArgumentError: fewer are visible.
    """
    if device.type == "cuda" and (visible := torch.cuda.device_count()) < count:
        raise ArgumentError(
            "--tensor-parallel-size",
            f"{count} ranks need one device each, but only {visible} are visible; reduce the number of ranks, or make "
            "more devices visible",
        )


def use_device(device: torch.device, index: int) -> None:
    """Select the visible accelerator number `index` for this process, unless `device` is the CPU.

    Raises:
        ArgumentError: there is no such accelerator.
    """
    check_devices(device, index + 1)
    if device.type == "cuda":
        torch.cuda.set_device(index)


def memory_bytes(device: torch.device, sharers: int = 1) -> int:
    """Return this rank's memory on `device` in bytes; on the CPU its share of the container's limit or, if less, of the
    machine's memory.

    Args:
        sharers: number of ranks of all engines on this machine. On the CPU they share the memory equally; each
            accelerator has a single rank.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return host_memory() // sharers


def device_name(device: torch.device) -> str:
    """Return the name of an accelerator, as its driver reports it, or ``CPU``."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def limit_threads(limit: int | None = None) -> None:
    """Limit torch's threads to the container's CPU limit, or to `limit` if that is lower.

    By default torch starts one thread per core of the machine. If the container's limit is lower, the kernel throttles
    them for the rest of each period, and every GEMM waits for its slowest thread.

    Args:
        limit: maximum number of threads; None: only the container's limit applies.
    """
    count = usable_threads() if limit is None else min(usable_threads(), limit)
    if count != torch.get_num_threads():
        torch.set_num_threads(count)


def usable_threads() -> int:
    """Return torch's number of threads or, if lower, the container's CPU limit, rounded up."""
    count, quota = torch.get_num_threads(), cpu_quota()
    return count if quota is None else max(1, min(count, math.ceil(quota)))


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Set the number of threads of torch's operators within the block; None changes nothing.

    torch's OpenMP threads spin for milliseconds after each operator, and would compete with the threads of the CPU
    kernels for the cores.
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
