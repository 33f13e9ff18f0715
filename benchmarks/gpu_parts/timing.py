"""Times of computations on a device: CUDA events on GPUs, the clock on CPUs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

#: Bytes that are written between two runs, more than a GPU's caches hold.
_FLUSHED = 256 << 20

Run = Callable[[], object]


def synchronize(device: torch.device) -> None:
    """Wait until the device has nothing to do."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def captured(run: Run) -> Callable[[], object]:
    """Capture the launches of `run` in a CUDA graph, and return its replay."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    return graph.replay


def median_ms(run: Run, device: torch.device, runs: int = 15, *, in_graph: bool = True) -> float:
    """Return the median time of `run` in ms, with flushed caches.

    Args:
        in_graph: on a GPU, replay `run` as a CUDA graph, which excludes the host's time.
    """
    if device.type == "cpu":
        run()
        return 1e3 * statistics.median(_clocked(run) for _ in range(runs))
    if in_graph:
        run = captured(run)
    else:
        run()
    trash, found = torch.empty(_FLUSHED, dtype=torch.uint8, device=device), []
    for _ in range(runs):
        trash.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end))
    return float(statistics.median(found))


def _clocked(run: Run) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def copy_bandwidth(device: torch.device, size: int = 1 << 30) -> float:
    """Return the bandwidth of a copy of `size` bytes in GB/s; reads and writes are both counted."""
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    took = median_ms(lambda: target.copy_(source), device, in_graph=False)  # copies are slower in graphs
    return 2 * size / took / 1e6
