"""How long replicas take to start, learned from those that started."""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import Final

#: How many start-ups the estimate is the median of. A few, so that it follows a new image or a larger model.
NUM_SAMPLES: Final = 5
#: What is assumed before a replica has started.
ASSUMED_SECONDS: Final = 30.0
#: A start-up that took longer was not one: nodes were full, or the image could not be pulled.
LONGEST_SECONDS: Final = 3600.0


class StartTime:
    """The start-up time of one endpoint's replicas.

    Args:
        known: what an earlier leader has learned, in seconds; None: nothing. Impossible values are ignored.
    """

    def __init__(self, known: float | None = None) -> None:
        self._samples: deque[float] = deque(maxlen=NUM_SAMPLES)
        if known is not None and math.isfinite(known) and 0 <= known <= LONGEST_SECONDS:
            self._samples.append(known)
        self._awaited: deque[tuple[int, float]] = deque()  # counts, ascending, and when each was written

    @property
    def seconds(self) -> float | None:
        """The estimate; None: no replica has started yet."""
        return median(self._samples) if self._samples else None

    def change(self, before: int, after: int, now: float) -> None:
        """The count is changed. After it falls, what was above it is not awaited any more."""
        while self._awaited and self._awaited[-1][0] > after:
            self._awaited.pop()
        if after > before:
            self._awaited.append((after, now))

    def observe(self, ready: int, has_failed: bool, now: float) -> None:
        """So many replicas are ready. A start that failed says nothing of how long one takes."""
        if has_failed:
            self._awaited.clear()
        while self._awaited and self._awaited[0][0] <= ready:
            _, written = self._awaited.popleft()
            if now - written <= LONGEST_SECONDS:
                self._samples.append(now - written)
