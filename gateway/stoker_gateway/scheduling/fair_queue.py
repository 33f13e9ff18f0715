"""Requests that wait until a server has room: fair by key, by priority, bounded in number and time.

Keys take turns, so one that floods the queue delays another by one turn of its own, however much it sends. Higher
priorities go first. When the queue is full, whoever has most in it gives up its newest request; that may be the
newcomer.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


class FairQueue(Generic[Item]):
    """A queue of items, each in it once at most.

    Args:
        max_items: how many may wait, unless `push` says otherwise.
        hold_s: for how many seconds each may, unless `push` or `extend` says otherwise.
    """

    def __init__(self, max_items: int, hold_s: float) -> None:
        self._max_items = max_items
        self._hold_s = hold_s
        # By priority, by key: the keys that are next come first.
        self._levels: dict[int, OrderedDict[str, deque[Item]]] = {}
        # By item: its priority, its key, and until when it waits.
        self._entries: OrderedDict[Item, tuple[int, str, float]] = OrderedDict()
        # Until when items wait, the earliest first; with entries that do not hold any more.
        self._limits: list[tuple[float, int, Item]] = []
        self._order = count()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Item]:
        """The items, in the order in which they came."""
        return iter(self._entries)

    @property
    def next_limit(self) -> float:
        """When the first of them has waited for too long; infinite if none waits."""
        while self._limits and not self._holds(self._limits[0]):
            heappop(self._limits)
        return self._limits[0][0] if self._limits else math.inf

    def push(
        self,
        key: str,
        priority: int,
        item: Item,
        now: float,
        hold_s: float | None = None,
        max_items: int | None = None,
    ) -> Item | None:
        """Lets an item wait.

        Args:
            priority: the higher, the earlier.
            hold_s: for how many seconds it may.
            max_items: how many may wait now.

        Returns:
            The item that must give way, which may be this one; None if there is room.
        """
        displaced: Item | None = None
        if len(self._entries) >= (self._max_items if max_items is None else max_items):
            displaced = self.least_deserving(key, priority)
            if displaced is None:
                return item
            self.remove(displaced)
        level = self._levels.setdefault(priority, OrderedDict())
        level.setdefault(key, deque()).append(item)
        self._entries[item] = (priority, key, 0.0)
        self.extend(item, now + (self._hold_s if hold_s is None else hold_s))
        return displaced

    def extend(self, item: Item, until: float) -> None:
        """Lets an item that waits do so until then."""
        priority, key, _ = self._entries[item]
        self._entries[item] = (priority, key, until)
        heappush(self._limits, (until, next(self._order), item))

    def pop(self, now: float, may_go: Callable[[Item], bool] = lambda item: True) -> Item | None:
        """Takes out whose turn it is; None if nobody may go. What is over its time is left to `expire`.

        Args:
            may_go: asked of one after the other, until one may. Those who may not keep their places.
        """
        for priority in sorted(self._levels, reverse=True):
            level = self._levels[priority]
            for key in list(level):
                item = next((each for each in level[key] if self._entries[each][2] > now and may_go(each)), None)
                if item is not None:
                    level.move_to_end(key)
                    self.remove(item)
                    return item
        return None

    def expire(self, now: float) -> list[Item]:
        """Takes out those that have waited for too long."""
        expired = []
        while self._limits and self._limits[0][0] <= now:
            limit = heappop(self._limits)
            if self._holds(limit):
                expired.append(limit[2])
                self.remove(limit[2])
        return expired

    def remove(self, item: Item) -> bool:
        """Takes out an item whose client has gone; whether it was there."""
        entry = self._entries.pop(item, None)
        if entry is None:
            return False
        priority, key, _ = entry
        level = self._levels[priority]
        queue = level[key]
        queue.remove(item)
        if not queue:
            del level[key]
        if not level:
            del self._levels[priority]
        if len(self._limits) > 2 * len(self._entries) + 64:
            self._limits = [each for each in self._limits if self._holds(each)]
            heapify(self._limits)
        return True

    def least_deserving(
        self, key: str, priority: int, weight: float = 1, weigh: Callable[[Item], float] | None = None
    ) -> Item | None:
        """The item that gives way to a newcomer: of the lowest priority below or at its own, the newest of the key that
        has most there. None: the newcomer itself.

        Args:
            weight: the newcomer's.
            weigh: how much an item counts; None: 1.
        """
        lowest = min(self._levels, default=priority)
        if lowest > priority or not self._levels:
            return None
        level = self._levels[lowest]
        weights = {
            each: float(len(items)) if weigh is None else sum(map(weigh, items)) for each, items in level.items()
        }
        largest = max(weights, key=lambda each: weights[each])
        if lowest == priority and weights[largest] <= weights.get(key, 0) + weight:
            return None
        return level[largest][-1]

    def _holds(self, limit: tuple[float, int, Item]) -> bool:
        entry = self._entries.get(limit[2])
        return entry is not None and entry[2] == limit[0]
