"""A model of Knative's pod autoscaler, by the mean concurrency over 60 s, or over 6 s in panic mode."""

from __future__ import annotations

import math
from collections import deque
from typing import Final

PERIOD_SECONDS: Final = 2.0
STABLE_SECONDS: Final = 60.0
PANIC_SECONDS: Final = 6.0
PANIC_THRESHOLD: Final = 2.0
MAX_DOWN_RATE: Final = 2.0


class KnativePodAutoscaler:
    """One revision's autoscaler, with Knative's defaults."""

    def __init__(self, lowest: int, highest: int, target: float) -> None:
        self.lowest, self.highest, self.target = lowest, highest, target
        self.samples: deque[tuple[float, float]] = deque()
        self.panic_since: float | None = None
        self.panic_replicas = 0

    def sample(self, concurrency: float, now: float) -> None:
        """Record the current concurrency."""
        self.samples.append((now, concurrency))
        while self.samples[0][0] <= now - STABLE_SECONDS:
            self.samples.popleft()

    def reconcile(self, ready: int, now: float) -> int:
        """Return the new number of replicas."""
        stable, panic = self._mean(STABLE_SECONDS, now), self._mean(PANIC_SECONDS, now)
        ready = max(1, ready)
        lowest_step = math.floor(ready / MAX_DOWN_RATE)
        desired = max(math.ceil(stable / self.target), lowest_step)
        in_panic = max(math.ceil(panic / self.target), lowest_step)
        if in_panic / ready >= PANIC_THRESHOLD:
            self.panic_since = now
        elif self.panic_since is not None and now - self.panic_since >= STABLE_SECONDS:
            self.panic_since, self.panic_replicas = None, 0
        if self.panic_since is not None:
            self.panic_replicas = max(self.panic_replicas, in_panic, desired)
            desired = self.panic_replicas
        return max(self.lowest, min(desired, self.highest))

    def _mean(self, seconds: float, now: float) -> float:
        recent = [value for time, value in self.samples if time > now - seconds]
        return sum(recent) / len(recent) if recent else 0.0
