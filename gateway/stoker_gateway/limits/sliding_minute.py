"""How much was used in the last minute, in slots of a second.

The current second and the 60 before it count. So what was used counts for 60 to 61 seconds: a limit holds in every
minute, whenever it begins, and who uses all of it, evenly, gets 60 parts of 61.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Final

#: Seconds, beside the current one.
MINUTE_S: Final = 60


class SlidingMinute:
    """What was used in one minute.

    Times are seconds of any clock. One that goes back stands still here until it has caught up.
    """

    __slots__ = ("slots", "total")

    def __init__(self) -> None:
        #: Second → how much was used in it, oldest first.
        self.slots: dict[int, int] = {}
        #: Of all slots.
        self.total = 0

    def expire(self, now: float) -> None:
        """Leaves out what is older than a minute."""
        oldest = math.floor(now) - MINUTE_S
        while self.slots and (second := next(iter(self.slots))) < oldest:
            self.total -= self.slots.pop(second)

    def add(self, amount: int, now: float) -> int:
        """Uses so much.

        Returns:
            the second in which it counts.
        """
        second = math.floor(now)
        if self.slots:
            second = max(second, next(reversed(self.slots)))
        self.slots[second] = self.slots.get(second, 0) + amount
        self.total += amount
        return second

    def give_back(self, second: int, amount: int) -> None:
        """So much of what was used in a second was not; of one that is more than a minute ago, it is forgotten."""
        if second in self.slots:
            amount = min(amount, self.slots[second])
            self.slots[second] -= amount
            self.total -= amount

    def ages(self, now: float) -> list[tuple[float, int]]:
        """What was used how many seconds ago, at the least; the oldest first."""
        return [(max(0.0, now - second - 1), used) for second, used in self.slots.items() if used]


def until_room(minutes: Iterable[SlidingMinute], amount: int, limit: int, now: float) -> float:
    """In how many seconds so much may be used, if nothing is used meanwhile: infinity for what is over the limit.

    Args:
        minutes: that the limit is for, together.
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
    """In how many seconds nothing counts any more, if nothing is used meanwhile."""
    last = max((next(reversed(minute.slots)) for minute in minutes if minute.slots), default=-math.inf)
    return max(0.0, last + MINUTE_S + 1 - now)
