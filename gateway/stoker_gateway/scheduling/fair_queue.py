"""Queue of waiting items that is fair between keys, ordered by priority, and bounded in number and time.

Items with a higher priority leave first. At the same priority keys take turns, so a key that floods the queue delays
another by only one turn. When the queue is full, the newest item of the key with the most items at the lowest priority
is displaced, which may be the item that is being added.
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
    """Queue of items, each of which may be in it only once.

    Args:
        max_items: maximum number of items, unless `push` sets another.
        max_wait_s: maximum time that an item waits, in seconds, unless `push` or `extend` sets another.
    """

    def __init__(self, max_items: int, max_wait_s: float) -> None:
        self._max_items = max_items
        self._max_wait_s = max_wait_s
        # Items by priority and key; the key whose turn is next comes first.
        self._levels: dict[int, OrderedDict[str, deque[Item]]] = {}
        # Item → its priority, its key, and the time at which it expires.
        self._entries: OrderedDict[Item, tuple[int, str, float]] = OrderedDict()
        # Heap of expiry times; it may contain outdated entries.
        self._expiries: list[tuple[float, int, Item]] = []
        self._order = count()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Item]:
        """Iterate over the items in the order of arrival."""
        return iter(self._entries)

    @property
    def next_expiry(self) -> float:
        """Time of the next expiry; infinite if there is none."""
        while self._expiries and not self._is_current(self._expiries[0]):
            heappop(self._expiries)
        return self._expiries[0][0] if self._expiries else math.inf

    def push(
        self,
        key: str,
        priority: int,
        item: Item,
        now: float,
        max_wait_s: float | None = None,
        max_items: int | None = None,
    ) -> Item | None:
        """Add an item.

        Args:
            priority: items with a higher priority leave first.
            max_wait_s: maximum time that it waits, in seconds; None means the queue's default.
            max_items: maximum number of items; None means the queue's default.

        Returns:
            The item that is displaced, which may be this one; None if there is room.
        """
        displaced: Item | None = None
        if len(self._entries) >= (self._max_items if max_items is None else max_items):
            displaced = self.displaced_by(key, priority)
            if displaced is None:
                return item
            self.remove(displaced)
        level = self._levels.setdefault(priority, OrderedDict())
        level.setdefault(key, deque()).append(item)
        self._entries[item] = (priority, key, 0.0)
        self.extend(item, now + (self._max_wait_s if max_wait_s is None else max_wait_s))
        return displaced

    def extend(self, item: Item, until: float) -> None:
        """Set the time at which a waiting item expires."""
        priority, key, _ = self._entries[item]
        self._entries[item] = (priority, key, until)
        heappush(self._expiries, (until, next(self._order), item))

    def pop(self, now: float, may_go: Callable[[Item], bool] = lambda item: True) -> Item | None:
        """Remove and return the next item; None if no item may leave. Expired items stay until `expire` is called.

        Args:
            may_go: called with one item after another until it returns True. Refused items keep their positions.
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
        """Remove and return the items that have expired."""
        expired = []
        while self._expiries and self._expiries[0][0] <= now:
            expiry = heappop(self._expiries)
            if self._is_current(expiry):
                expired.append(expiry[2])
                self.remove(expiry[2])
        return expired

    def remove(self, item: Item) -> bool:
        """Remove an item, and return whether it was in the queue."""
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
        if len(self._expiries) > 2 * len(self._entries) + 64:
            self._expiries = [each for each in self._expiries if self._is_current(each)]
            heapify(self._expiries)
        return True

    def displaced_by(
        self, key: str, priority: int, weight: float = 1, weigh: Callable[[Item], float] | None = None
    ) -> Item | None:
        """Return the item that a new item displaces: at the lowest priority in the queue, the newest item of the key
        with the largest weight. None means that the new item itself is rejected.

        Args:
            weight: weight of the new item.
            weigh: returns the weight of an item; None means that each weighs 1.
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

    def _is_current(self, expiry: tuple[float, int, Item]) -> bool:
        entry = self._entries.get(expiry[2])
        return entry is not None and entry[2] == expiry[0]
