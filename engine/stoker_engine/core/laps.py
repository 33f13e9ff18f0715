"""Durations of the consecutive parts of a start, on the monotonic clock, which all processes of a machine share."""

from __future__ import annotations

import time
from collections.abc import Iterable

#: The name of a part, and when it ended, in seconds on the monotonic clock.
Lap = tuple[str, float]


class Laps:
    """Records when each part of a start ends, which is when the next part begins.

    Attributes:
        ended: the parts, in order.
    """

    def __init__(self) -> None:
        self.ended: list[Lap] = []

    def end(self, part: str) -> None:
        """Record that `part` ends now."""
        self.ended.append((part, time.monotonic()))


def describe(start: float, laps: Iterable[Lap]) -> str:
    """Format the duration of the whole start and of each part, for the log.

    Args:
        start: when the first part began, in seconds on the monotonic clock.

    Returns:
        For example "6.21 s: server 0.40, imports 3.11, weights 2.70".
    """
    parts, begin = [], start
    for part, end in laps:
        parts.append(f"{part} {end - begin:.2f}")
        begin = end
    return f"{begin - start:.2f} s: {', '.join(parts)}"
