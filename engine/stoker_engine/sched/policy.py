"""Who is served first. A policy gives each request its place in line: a tuple, the lowest goes first.

    fcfs       (arrival,)                first come, first served
    priority   (priority, arrival)       a request's own number first

Waiting sequences are admitted in line; when blocks run out, the last in line gives its own back. So a preempted one,
which is before everyone who came later, returns to its old place.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection

from stoker_engine.contract.names import SchedulingPolicy
from stoker_engine.core.adapter import NO_ADAPTER
from stoker_engine.core.engine_request import EngineRequest
from stoker_engine.core.request import Sequence


def arrival_key(policy: SchedulingPolicy, spec: EngineRequest, arrival: int) -> tuple[int, ...]:
    """The place of the request that came as number `arrival`."""
    return (spec.priority, arrival) if policy == "priority" else (arrival,)


class WaitingQueue:
    """Sequences that wait, in line."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self._num_of: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, index: int) -> Sequence:
        return self._sequences[index]

    @property
    def adapters(self) -> Collection[int]:
        """The numbers of the adapters of those that wait."""
        return self._num_of.keys()

    def num_of(self, adapter: int) -> int:
        """How many wait that use this adapter."""
        return self._num_of.get(adapter, 0)

    def add(self, sequence: Sequence) -> None:
        """Takes its place."""
        bisect.insort(self._sequences, sequence, key=lambda waiting: waiting.sort_key)
        if (adapter := sequence.request.spec.adapter) != NO_ADAPTER:
            self._num_of[adapter] = self.num_of(adapter) + 1

    def first(self) -> Sequence:
        """Who is admitted next."""
        return self._sequences[0]

    def remove(self, sequence: Sequence) -> None:
        """Leaves the line."""
        self._sequences.remove(sequence)
        if (adapter := sequence.request.spec.adapter) != NO_ADAPTER:
            self._num_of[adapter] -= 1
            if not self._num_of[adapter]:
                del self._num_of[adapter]
