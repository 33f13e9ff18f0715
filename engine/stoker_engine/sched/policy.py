"""Scheduling policies. A policy gives each request a sort key; the request with the lowest key is served first.

    fcfs       (arrival,)                first come, first served
    priority   (priority, arrival)       lowest value of the request's `priority` first

Waiting sequences are admitted in the order of their sort keys; when blocks run out, the running sequence with the
highest key is preempted. A preempted sequence therefore returns to its old position in the queue.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection

from stoker_engine.contract.names import SchedulingPolicy
from stoker_engine.core.adapter import NO_ADAPTER
from stoker_engine.core.engine_request import EngineRequest
from stoker_engine.core.request import Sequence


def arrival_key(policy: SchedulingPolicy, spec: EngineRequest, arrival: int) -> tuple[int, ...]:
    """Return the sort key of the request that arrived as number `arrival`."""
    return (spec.priority, arrival) if policy == "priority" else (arrival,)


class WaitingQueue:
    """Waiting sequences, ordered by `sort_key`."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self._num_of: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, index: int) -> Sequence:
        return self._sequences[index]

    @property
    def adapters(self) -> Collection[int]:
        """Numbers of the adapters that waiting sequences use."""
        return self._num_of.keys()

    def num_of(self, adapter: int) -> int:
        """Number of waiting sequences that use this adapter."""
        return self._num_of.get(adapter, 0)

    def add(self, sequence: Sequence) -> None:
        """Insert a sequence by its key."""
        bisect.insort(self._sequences, sequence, key=lambda waiting: waiting.sort_key)
        if (adapter := sequence.request.spec.adapter) != NO_ADAPTER:
            self._num_of[adapter] = self.num_of(adapter) + 1

    def first(self) -> Sequence:
        """The sequence with the lowest key."""
        return self._sequences[0]

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence."""
        self._sequences.remove(sequence)
        if (adapter := sequence.request.spec.adapter) != NO_ADAPTER:
            self._num_of[adapter] -= 1
            if not self._num_of[adapter]:
                del self._num_of[adapter]
