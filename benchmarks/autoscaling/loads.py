"""Loads: seeded arrival rates over time."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Load:
    """A load.

    Attributes:
        rate: requests per second as a function of time in seconds, at most `highest`.
        seconds: duration of arrivals.
        start_seconds: median start-up time of pods.
    """

    name: str
    rate: Callable[[float], float]
    highest: float
    seconds: float = 3600.0
    start_seconds: float = 25.0

    def arrivals(self, seed: int) -> Iterator[float]:
        """Yield arrival times in seconds: a Poisson process with this rate, by thinning."""
        generator = random.Random(f"{self.name} {seed}")
        now = 0.0
        while (now := now + generator.expovariate(self.highest)) < self.seconds:
            if generator.random() * self.highest < self.rate(now):
                yield now


LOADS: Final = (
    Load("step", lambda t: 2.0 if t < 600 or t >= 2400 else 12.0, 12.0),
    Load("ramp", lambda t: 1.0 + 15.0 * max(0.0, 1.0 - abs(t - 1800) / 1500), 16.0),
    Load("spike", lambda t: 14.0 if t % 1200 < 90 and t >= 600 else 2.0, 14.0),
    Load("diurnal", lambda t: 6.0 - 5.0 * math.cos(2 * math.pi * t / 3600), 11.0, 7200.0),
    Load("flapping", lambda t: 9.0 if t % 240 < 120 else 2.0, 9.0),
    Load("slow-start", lambda t: 2.0 if t < 600 or t >= 2400 else 10.0, 10.0, start_seconds=150.0),
)
#: A load that needs 500 pods at the target, then 1,000.
LARGE: Final = Load("1,000 pods", lambda t: 600.0 if t < 20 else 1200.0, 1200.0, 100.0)
