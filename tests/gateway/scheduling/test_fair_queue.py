"""The fair queue: only a flooding key waits; number and time are bounded."""

from __future__ import annotations

import math
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from stoker_gateway.scheduling.fair_queue import FairQueue

MAX_ITEMS, HOLD = 8, 5.0


class AnyUse(RuleBasedStateMachine):
    """After any operations, each item leaves once, in its key's order, in time."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: FairQueue[int] = FairQueue(MAX_ITEMS, HOLD)
        self.now = 0.0
        self.waiting: dict[int, tuple[str, int, float]] = {}
        self.next = 0

    @rule(key=st.sampled_from("abc"), priority=st.integers(0, 2))
    def push(self, key: str, priority: int) -> None:
        item, self.next = self.next, self.next + 1
        full = len(self.waiting) >= MAX_ITEMS
        displaced = self.queue.push(key, priority, item, self.now)
        self.waiting[item] = (key, priority, self.now + HOLD)
        assert (displaced is not None) == full
        if displaced is not None:
            _, gone_priority, _ = self.waiting[displaced]
            assert gone_priority == min(each[1] for each in self.waiting.values()) or displaced == item
            assert gone_priority <= priority
            lost = self.waiting.pop(displaced)
            if displaced != item:
                # No key loses a place to one that would then have more.
                counts = Counter(each[0] for each in self.waiting.values() if each[1] == lost[1])
                assert lost[1] < priority or counts[key] <= counts[lost[0]] + 1

    @rule()
    def pop(self) -> None:
        item = self.queue.pop(self.now)
        fresh = {each: state for each, state in self.waiting.items() if state[2] > self.now}
        if item is None:
            assert not fresh
            return
        key, priority, _ = fresh[item]
        assert priority == max(state[1] for state in fresh.values())
        assert item == min(each for each, state in fresh.items() if state[:2] == (key, priority))
        del self.waiting[item]

    @rule(data=st.data(), seconds=st.sampled_from([0.0, 1.0, 20.0]))
    def extend(self, data: st.DataObject, seconds: float) -> None:
        if self.waiting:
            item = data.draw(st.sampled_from(sorted(self.waiting)))
            self.queue.extend(item, self.now + seconds)
            self.waiting[item] = (*self.waiting[item][:2], self.now + seconds)

    @rule(seconds=st.sampled_from([0.0, 0.5, 2.0, 5.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def expire(self) -> None:
        over = self.queue.expire(self.now)
        assert set(over) == {each for each, state in self.waiting.items() if state[2] <= self.now}
        for item in over:
            del self.waiting[item]

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        item = data.draw(st.integers(0, max(0, self.next)))
        assert self.queue.remove(item) == (self.waiting.pop(item, None) is not None)

    @invariant()
    def is_bounded(self) -> None:
        assert len(self.queue) == len(self.waiting) <= MAX_ITEMS
        assert list(self.queue) == sorted(self.waiting)
        assert self.queue.next_expiry == min((state[2] for state in self.waiting.values()), default=math.inf)


TestAnyUse = AnyUse.TestCase


@given(st.integers(1, 200), st.lists(st.sampled_from("bcd"), min_size=1, max_size=10))
def test_flood_delays_each_item_of_another_key_by_one_turn(flood: int, keys: list[str]) -> None:
    queue: FairQueue[tuple[str, int]] = FairQueue(1000, 60.0)
    for number in range(flood):
        queue.push("flood", 0, ("flood", number), 0.0)
    for number, key in enumerate(keys):
        queue.push(key, 0, (key, number), 0.0)
    order = []
    while (item := queue.pop(1.0)) is not None:
        order.append(item[0])
    for key in set(keys):
        for nth in range(1, keys.count(key) + 1):
            position = [at for at, each in enumerate(order) if each == key][nth - 1]
            assert Counter(order[:position])["flood"] <= nth


def test_full_queue_displaces_items_of_the_key_with_most() -> None:
    queue: FairQueue[str] = FairQueue(3, 60.0)
    assert [queue.push("flood", 0, f"f{number}", 0.0) for number in range(4)] == [None, None, None, "f3"]
    assert queue.push("other", 0, "o", 0.0) == "f2"
    assert queue.push("late", 0, "l", 0.0) == "f1"
    assert queue.push("later", 0, "n", 0.0) == "n"
    assert queue.push("urgent", 1, "u", 0.0) in {"f0", "o", "l"}
    assert queue.pop(0.0) == "u"


def test_skipped_items_keep_their_position_and_turn() -> None:
    queue: FairQueue[str] = FairQueue(10, 10)
    for item in ("a1", "a2", "b1", "b2"):
        queue.push(item[0], 0, item, 0)
    assert queue.pop(1, lambda item: item not in ("a1", "b1")) == "a2"
    assert queue.pop(1, lambda item: item[0] == "a") == "a1"
    assert queue.pop(1, lambda item: False) is None
    assert [queue.pop(1), queue.pop(1), queue.pop(1)] == ["b1", "b2", None]
