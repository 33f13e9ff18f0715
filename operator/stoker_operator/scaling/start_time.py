"""Learns the start-up time of replicas."""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import Final

#: Number of start-ups whose median is the estimate. A small number lets the estimate follow a new image or model.
NUM_SAMPLES: Final = 5
#: Estimate before a replica has started, in seconds.
ASSUMED_SECONDS: Final = 30.0
#: Start-ups that take longer than this, in seconds, are ignored: nodes were full, or the image could not be pulled.
LONGEST_SECONDS: Final = 3600.0


class StartTime:
    """The start-up time of one endpoint's replicas.

    Args:
        known: the estimate of an earlier leader in seconds, if there is one. Impossible values are ignored.
    """

    def __init__(self, known: float | None = None) -> None:
        self._samples: deque[float] = deque(maxlen=NUM_SAMPLES)
        if known is not None and math.isfinite(known) and 0 <= known <= LONGEST_SECONDS:
            self._samples.append(known)
        self._awaited: deque[tuple[int, float]] = (
            deque()
        )  # (number of replicas, time at which it was set), ascending by both

    @property
    def seconds(self) -> float | None:
        """The estimate in seconds, or None while unknown."""
        return median(self._samples) if self._samples else None

    def change(self, before: int, after: int, now: float) -> None:
        """Record a change of the number of replicas. After a decrease, larger numbers are no longer awaited."""
        while self._awaited and self._awaited[-1][0] > after:
            self._awaited.pop()
        if after > before:
            self._awaited.append((after, now))

    def observe(self, ready: int, has_failed: bool, now: float) -> None:
        """Record the number of ready replicas. Failed starts are not measured."""
        if has_failed:
            self._awaited.clear()
        while self._awaited and self._awaited[0][0] <= ready:
            _, written = self._awaited.popleft()
            if now - written <= LONGEST_SECONDS:
                self._samples.append(now - written)
