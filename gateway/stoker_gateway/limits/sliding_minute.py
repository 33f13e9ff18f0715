"""Usage of the last minute, in slots of one second.

The window is the current second and the 60 before it. Usage thus counts for 60 to 61 seconds: a limit holds in any
period of 60 seconds, and a client with steady usage gets 60/61 of the limit.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Final

#: Number of seconds in the window besides the current one.
MINUTE_S: Final = 60


class SlidingMinute:
    """Usage in the window. Times are seconds of any clock.

    If the clock goes back, usage is added to the latest second until the clock catches up.
    """

    __slots__ = ("slots", "total")

    def __init__(self) -> None:
        #: Second → amount used in it, oldest first.
        self.slots: dict[int, int] = {}
        #: Sum of all slots.
        self.total = 0

    def expire(self, now: float) -> None:
        """Drop usage outside the window."""
        oldest = math.floor(now) - MINUTE_S
        while self.slots and (second := next(iter(self.slots))) < oldest:
            self.total -= self.slots.pop(second)

    def add(self, amount: int, now: float) -> int:
        """Record usage.

        Returns:
            The second to which the usage was added.
        """
        second = math.floor(now)
        if self.slots:
            second = max(second, next(reversed(self.slots)))
        self.slots[second] = self.slots.get(second, 0) + amount
        self.total += amount
        return second

    def release(self, second: int, amount: int) -> None:
        """Subtract usage from a second, but not below 0; a second without usage is ignored."""
        if second in self.slots:
            amount = min(amount, self.slots[second])
            self.slots[second] -= amount
            self.total -= amount

    def ages(self, now: float) -> list[tuple[float, int]]:
        """Return the minimum age in seconds and the amount of each second's usage, oldest first."""
        return [(max(0.0, now - second - 1), used) for second, used in self.slots.items() if used]


def until_room(minutes: Iterable[SlidingMinute], amount: int, limit: int, now: float) -> float:
    """Return the seconds until `amount` may be used, if nothing is used meanwhile; infinite if it exceeds the limit.

    Args:
        minutes: usages whose sum is limited.
    """
    if amount > limit:
        return math.inf
    slots = Counter[int]()
    for minute in minutes:
        slots.update(minute.slots)
    excess = slots.total() + amount - limit
    for second in sorted(slots):
        if excess <= 0:
            break
        excess -= slots[second]
        if excess <= 0:
            return max(0.0, second + MINUTE_S + 1 - now)
    return 0.0


def until_empty(minutes: Iterable[SlidingMinute], now: float) -> float:
    """Return the seconds until all usage has expired, if nothing is used meanwhile."""
    last = max((next(reversed(minute.slots)) for minute in minutes if minute.slots), default=-math.inf)
    return max(0.0, last + MINUTE_S + 1 - now)
