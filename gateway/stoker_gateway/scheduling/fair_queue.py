"""Requests that wait until a server has room: fair by key, by priority, bounded in number and time.

Keys take turns, so one that floods the queue delays another by one turn of its own, however much it sends. Higher
priorities go first. When the queue is full, whoever has most in it gives up its newest request; that may be the
newcomer.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


class FairQueue(Generic[Item]):
    """A queue of items, each in it once at most.

    Args:
        max_items: how many may wait.
        hold_s: for how many seconds each may.
    """

    def __init__(self, max_items: int, hold_s: float) -> None:
        self._max_items = max_items
        self._hold_s = hold_s
        # By priority, by key: the keys that are next come first.
        self._levels: dict[int, OrderedDict[str, deque[Item]]] = {}
        # By item: its priority, its key, and until when it waits.
        self._entries: OrderedDict[Item, tuple[int, str, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def push(self, key: str, priority: int, item: Item, now: float) -> Item | None:
        """Lets an item wait.

        Args:
            priority: the higher, the earlier.

        Returns:
            The item that must give way, which may be this one; None if there is room.
        """
        displaced: Item | None = None
        if len(self._entries) >= self._max_items:
            displaced = self._least_deserving(key, priority)
            if displaced is None:
                return item
            self.remove(displaced)
        level = self._levels.setdefault(priority, OrderedDict())
        level.setdefault(key, deque()).append(item)
        self._entries[item] = (priority, key, now + self._hold_s)
        return displaced

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
        for item, (_, _, until) in self._entries.items():
            if until > now:
                break  # they came in order, and all wait for the same time
            expired.append(item)
        for item in expired:
            self.remove(item)
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
        return True

    def _least_deserving(self, key: str, priority: int) -> Item | None:
        """Who gives way to a newcomer: of the lowest priority below or at its own, the newest of who has most there."""
        lowest = min(self._levels, default=priority)
        if lowest > priority or not self._levels:
            return None
        level = self._levels[lowest]
        largest = max(level, key=lambda each: len(level[each]))
        if lowest == priority and len(level[largest]) <= len(level.get(key, ())) + 1:
            return None
        return level[largest][-1]
