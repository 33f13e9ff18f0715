"""Time in which a device computes, by torch's profiler."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Self

import torch
from torch.profiler import ProfilerActivity, profile


class BusyTime:
    """Records steps in the middle of a run.

    Args:
        streams: number of requests that get tokens in a recorded step.
        skipped: number of such steps before the recorded ones.
        recorded: number of recorded steps.

    Attributes:
        ms_per_step: time in which at least one kernel or copy ran, per step.
    """

    def __init__(self, device: torch.device, streams: int, skipped: int, recorded: int) -> None:
        self._on_gpu, self._streams, self._skipped, self._recorded = device.type == "cuda", streams, skipped, recorded
        self._profile = profile(activities=[ProfilerActivity.CUDA if self._on_gpu else ProfilerActivity.CPU])
        self._count = 0
        self.ms_per_step = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None and self._count <= self._skipped + self._recorded:
            raise RuntimeError(f"only {self._count} steps had {self._streams} streams; generate more tokens")

    def step(self, count: int) -> None:
        """Called after each step, with the number of requests that got tokens."""
        if count != self._streams:
            return
        self._count += 1
        if self._count == self._skipped + 1:
            self._profile.start()
        elif self._count == self._skipped + 1 + self._recorded:
            self._profile.stop()
            self.ms_per_step = covered(self._intervals()) / 1e3 / self._recorded

    def _intervals(self) -> Iterable[tuple[float, float]]:
        """Return begin and end of each activity, in µs."""
        kind = "CUDA" if self._on_gpu else "CPU"
        events = self._profile.events() or ()
        return [(each.time_range.start, each.time_range.end) for each in events if each.device_type.name == kind]


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        total += max(stop - max(start, end), 0.0)
        end = max(end, stop)
    return total
