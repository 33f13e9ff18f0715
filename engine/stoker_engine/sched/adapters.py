"""LoRA adapters of the scheduler: which are in memory, and which a step may use.

    registered   usable by requests; unlimited in number; a first load checks the files
    resident     in memory: at most `num_resident`; a new one may evict another
    in a slot    usable by steps: at most `num_slots`; a new one may take another's slot

An adapter that running sequences use keeps its memory and its slot. A waiting sequence may therefore be *blocked*: it
waits for a load of its adapter, which runs concurrently with the steps, or for a slot. Sequences behind it in the queue
are admitted meanwhile. To prevent starvation, slots are *reserved*:

    slot 1, of adapter a     ── a1 ──┐ ended           ┌ b1 starts
                                ── a3 (after b1) ──────┤          a4 waits for a slot, behind b1
    queue                    b1 (adapter b), a4        │
                                     └ reserved for b ─┘

Once all running sequences of a slot are behind a blocked sequence in the queue order, the slot may be reserved for the
blocked sequence's adapter. Sequences behind the blocked one are no longer admitted to the slot, and the adapter takes
the slot when no sequence runs in it. Further sequences of a request that already runs in the slot are still admitted,
since beams wait for each other.

The table decides; `adapter_loads` carries the decisions out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Final

from stoker_engine.core.adapter import NO_ADAPTER, AdapterSource, LoadedAdapter
from stoker_engine.core.request import Sequence
from stoker_engine.core.step_report import AdapterStats
from stoker_engine.sched.policy import WaitingQueue

#: Maximum number of unfinished loads for requests: one runs and one is queued. The next is decided when one ends.
MAX_LOADS: Final = 2


class _Memory(Enum):
    """State of an adapter's weights in memory."""

    ABSENT = auto()
    LOADING = auto()
    RESIDENT = auto()


@dataclass(eq=False, slots=True)
class _Adapter:
    """A registered adapter.

    Attributes:
        slot: its slot, or None.
        reserved: the slot reserved for it, or None.
        last_used: value of the table's use counter when a sequence last started or stopped running with it, or it
            was loaded.
        is_checked: whether a load of it has succeeded.
        is_checking: whether the load in flight was started by the registration, not by a request.
        is_passing: whether the load in flight is a check after which the adapter is dropped, because memory is full.
        is_removed: whether it takes no new requests, and is unregistered when its last request has ended.
    """

    source: AdapterSource
    memory: _Memory = _Memory.ABSENT
    slot: _Slot | None = None
    reserved: _Slot | None = None
    last_used: int = 0
    is_checked: bool = False
    is_checking: bool = False
    is_passing: bool = False
    is_removed: bool = False


@dataclass(eq=False, slots=True)
class _Slot:
    """An adapter slot of the steps.

    Attributes:
        adapter: the adapter in it.
        running: the sequences that run with it.
        reserved_for: the adapter that takes the slot when no sequence runs in it.
        reserved_from: sort key of the blocked sequence; sequences behind it are not admitted to a reserved slot.
    """

    index: int
    adapter: _Adapter | None = None
    running: set[Sequence] = field(default_factory=set)
    reserved_for: _Adapter | None = None
    reserved_from: tuple[int, ...] = ()

    def is_closed_to(self, sequence: Sequence) -> bool:
        """Whether the slot is reserved for a sequence that precedes this one in the queue order. A slot is never closed
        to a request that already runs in it."""
        if self.reserved_for is None or self.reserved_from >= sequence.sort_key:
            return False
        return all(running.request is not sequence.request for running in self.running)

    def cancel_reservation(self) -> None:
        """Open the slot to all sequences."""
        if self.reserved_for is not None:
            self.reserved_for.reserved = None
            self.reserved_for = None


class AdapterTable:
    """The adapters of an engine. A *pass* is an iteration of `Scheduler.schedule` over the queue of waiting sequences.

    Args:
        num_slots: maximum number of adapters in a step.
        num_resident: maximum number of adapters in memory, including the adapters in slots.
        waiting: the queue of waiting sequences.
    """

    def __init__(self, num_slots: int, num_resident: int, waiting: WaitingQueue) -> None:
        assert 0 < num_slots <= num_resident
        self._num_resident = num_resident
        self._waiting = waiting
        self._adapters: dict[int, _Adapter] = {}
        self._slots = [_Slot(index) for index in range(num_slots)]
        self._in_memory: set[_Adapter] = set()
        self._to_check: deque[_Adapter] = deque()
        self._num_loading = 0  # unfinished loads for requests
        self._is_checking = False
        self._num_removed = 0
        self._uses = 0
        self._passed: set[int] = set()  # adapters whose sequences were blocked in this pass
        self._num_passed = 0  # blocked sequences at the front of the queue
        self._is_full = False  # no adapter can be evicted in this pass
        self._changes: list[tuple[int, int]] = []
        self._loads: list[AdapterSource] = []
        self._drops: list[int] = []
        self._num_loads = self._num_evictions = self._num_failures = 0
        self._load_seconds: list[float] = []
        self._has_news = False

    # --- registration

    def register(self, source: AdapterSource) -> None:
        """Register an adapter, and queue a load that checks its files."""
        assert source.number not in self._adapters, f"adapter {source.number} is registered"
        adapter = self._adapters[source.number] = _Adapter(source)
        self._to_check.append(adapter)

    def remove(self, number: int) -> None:
        """Refuse new requests for an adapter. It is unregistered when its last request has ended; see
        `drop_removed`."""
        adapter = self._adapters.get(number)
        if adapter is not None and not adapter.is_removed:
            adapter.is_removed = True
            self._num_removed += 1

    def takes(self, number: int) -> bool:
        """Whether new requests may use this adapter."""
        adapter = self._adapters.get(number)
        return adapter is not None and not adapter.is_removed

    def has(self, number: int) -> bool:
        """Whether an adapter is registered. Removed ones are until `drop_removed` unregisters them."""
        return number in self._adapters

    def drop_removed(self, is_used: Callable[[int], bool]) -> None:
        """Unregister removed adapters that no request uses and that are not being loaded."""
        if not self._num_removed:
            return
        for number, adapter in list(self._adapters.items()):
            if adapter.is_removed and adapter.memory is not _Memory.LOADING and not is_used(number):
                self._forget(adapter)

    # --- the scheduler's pass

    def begin_pass(self) -> None:
        """Restart the pass at the front of the queue, and cancel reservations for adapters that no waiting sequence
        uses."""
        self._restart_pass()
        for slot in self._slots:
            if slot.reserved_for is not None and not self._waiting.num_of(slot.reserved_for.source.number):
                slot.cancel_reservation()

    def first_waiting(self) -> Sequence | None:
        """Return the first waiting sequence that is not blocked, or None. For the sequences before it, loads are
        started and slots reserved as far as possible."""
        while self._num_passed < len(self._waiting):
            sequence = self._waiting[self._num_passed]
            if sequence.request.spec.adapter == NO_ADAPTER or self._find(sequence) is not None:
                return sequence
            self._num_passed += 1
        return None

    def enter(self, sequence: Sequence) -> None:
        """Admit a sequence that `first_waiting` has returned, and give its adapter a slot."""
        slot = self._find(sequence)
        assert slot is not None, "admitted without a slot"
        adapter = self._adapters[sequence.request.spec.adapter]
        if slot.adapter is not adapter:
            if slot.adapter is not None:
                slot.adapter.slot = None
            slot.adapter, adapter.slot = adapter, slot
            self._changes.append((slot.index, adapter.source.number))
            slot.cancel_reservation()
            if adapter.reserved is not None:
                adapter.reserved.cancel_reservation()
        self._run(sequence, slot)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Run `child`, a fork of the running `parent`, in the parent's slot."""
        self._run(child, self._slots[parent.adapter_slot])

    def leave(self, sequence: Sequence) -> None:
        """Take a sequence out of its slot when it stops running. A later step may give the slot to another adapter
        even while a step with this sequence is in flight: steps run in order."""
        slot = self._slots[sequence.adapter_slot]
        slot.running.remove(sequence)
        sequence.adapter_slot = NO_ADAPTER
        assert slot.adapter is not None
        self._use(slot.adapter)
        self._restart_pass()

    def pop_changes(self) -> list[tuple[int, int]]:
        """Return the (slot, adapter number) pairs of slots whose adapter has changed since the last call."""
        changes, self._changes = self._changes, []
        return changes

    def discard_slots(self) -> None:
        """Empty all slots after the runner's slots have become unknown. No sequence may be running."""
        for slot in self._slots:
            assert not slot.running
            if slot.adapter is not None:
                slot.adapter.slot = None
                slot.adapter = None
        self._changes.clear()

    # --- loads

    @property
    def is_loading(self) -> bool:
        """Whether a load is in flight or queued."""
        return self._num_loading > 0 or self._is_checking or bool(self._to_check)

    def pop_decisions(self) -> tuple[list[int], list[AdapterSource]]:
        """Return the numbers of adapters to drop from memory, and the adapters to load after that. The caller must call
        `loaded` or `failed` for each load."""
        while self._to_check and not self._is_checking:
            adapter = self._to_check.popleft()
            if adapter.memory is _Memory.ABSENT and self._adapters.get(adapter.source.number) is adapter:
                self._is_checking = adapter.is_checking = True
                adapter.is_passing = not self._make_room(lambda resident: self._num_waiting(resident) == 0)
                self._begin_load(adapter)
        drops, loads = self._drops, self._loads
        self._drops, self._loads = [], []
        return drops, loads

    def source_of(self, number: int) -> AdapterSource:
        """Return the source of a registered adapter. After a successful load it has the digest of the files."""
        return self._adapters[number].source

    def loaded(self, number: int, loaded: LoadedAdapter) -> None:
        """Record that a load has succeeded."""
        adapter = self._ended(number)
        adapter.is_checked = True
        adapter.source = replace(adapter.source, digest=loaded.digest)
        self._num_loads += 1
        self._load_seconds.append(loaded.seconds)
        if adapter.is_passing:
            adapter.is_passing = False
            self._drops.append(number)
            return
        self._in_memory.add(adapter)
        adapter.memory = _Memory.RESIDENT
        self._use(adapter)

    def failed(self, number: int) -> None:
        """Record that a load has failed. The caller ends the requests that wait for the adapter. An adapter that was
        never loaded is unregistered; others are loaded again for the next request."""
        adapter = self._ended(number)
        adapter.is_passing = False
        self._num_failures += 1
        if not adapter.is_checked:
            self._forget(adapter)

    # --- queries and metrics

    @property
    def has_news(self) -> bool:
        """Whether loads have ended that `stats` has not reported."""
        return self._has_news

    @property
    def has_removed(self) -> bool:
        """Whether removed adapters are still registered."""
        return self._num_removed > 0

    def stats(self) -> AdapterStats:
        """Return a snapshot for the metrics. Each load's duration is reported once."""
        self._has_news = False
        seconds, self._load_seconds = self._load_seconds, []
        return AdapterStats(
            running=tuple(sorted(slot.adapter.source.name for slot in self._slots if slot.adapter and slot.running)),
            waiting=tuple(sorted(self._adapters[number].source.name for number in self._waiting.adapters)),
            loads=self._num_loads,
            evictions=self._num_evictions,
            failures=self._num_failures,
            load_seconds=tuple(seconds),
        )

    def check(self, running: list[Sequence]) -> None:
        """Assert that slots, memory and the running sequences are consistent."""
        assert len(self._in_memory) <= self._num_resident
        adapters = self._adapters.values()
        assert self._in_memory == {a for a in adapters if a.memory is not _Memory.ABSENT and not a.is_passing}
        assert self._num_loading + self._is_checking == sum(a.memory is _Memory.LOADING for a in adapters)
        assert self._num_loading <= MAX_LOADS
        for slot in self._slots:
            assert slot.running == {sequence for sequence in running if sequence.adapter_slot == slot.index}
            assert all(slot.adapter is self._adapters[sequence.request.spec.adapter] for sequence in slot.running)
            assert slot.adapter is None or slot.adapter.slot is slot
            assert slot.reserved_for is None or slot.reserved_for.reserved is slot
        for adapter in adapters:
            assert adapter.slot is None or adapter.memory is _Memory.RESIDENT
            assert adapter.slot is None or adapter.slot.adapter is adapter
        with_adapter = [sequence for sequence in running if sequence.request.spec.adapter != NO_ADAPTER]
        assert sum(len(slot.running) for slot in self._slots) == len(with_adapter)

    # --- within

    def _restart_pass(self) -> None:
        self._passed.clear()
        self._num_passed = 0
        self._is_full = False

    def _find(self, sequence: Sequence) -> _Slot | None:
        """Return the slot that a waiting sequence may run in. None: it is blocked; if possible, a load of its adapter
        was started or a slot was reserved."""
        number = sequence.request.spec.adapter
        adapter = self._adapters[number]
        if adapter.slot is not None:
            if not adapter.slot.is_closed_to(sequence):
                return adapter.slot
        elif number not in self._passed:  # else an earlier sequence has already requested a load or a slot for it
            if adapter.memory is _Memory.RESIDENT:
                if (slot := self._takable(adapter, sequence)) is not None:
                    return slot
                self._reserve(adapter, sequence)
            elif adapter.memory is _Memory.ABSENT and not self._load(adapter):
                self._reserve(adapter, sequence)
        self._passed.add(number)
        return None

    def _takable(self, adapter: _Adapter, sequence: Sequence) -> _Slot | None:
        """Return the slot without running sequences that `adapter` may take: the one reserved for it, else one without
        an adapter, else the least recently used one; None: there is none."""
        if adapter.reserved is not None and not adapter.reserved.running:
            return adapter.reserved
        slots = [slot for slot in self._slots if not slot.running and not slot.is_closed_to(sequence)]
        return min(slots, key=lambda slot: slot.adapter.last_used if slot.adapter else -1, default=None)

    def _reserve(self, adapter: _Adapter, sequence: Sequence) -> None:
        """Reserve for `adapter` a slot whose running sequences are all behind `sequence` in the queue order, if there
        is one. An existing reservation gets the key of `sequence`."""
        key = sequence.sort_key
        if adapter.reserved is None:
            free = [slot for slot in self._slots if slot.reserved_for is None]
            overtaken = [slot for slot in free if all(key < running.sort_key for running in slot.running)]
            if not overtaken:
                return
            adapter.reserved = min(overtaken, key=lambda slot: len(slot.running))
            adapter.reserved.reserved_for = adapter
        adapter.reserved.reserved_from = key

    def _load(self, adapter: _Adapter) -> bool:
        """Start a load, or leave it to a later pass if `MAX_LOADS` are unfinished. False: memory is full, and no
        adapter may be evicted."""
        if self._num_loading >= MAX_LOADS:
            return True
        if self._is_full or not self._make_room(lambda resident: resident.source.number not in self._passed):
            self._is_full = True
            return False
        if adapter.reserved is not None:
            adapter.reserved.cancel_reservation()  # the slot should not stay unused during the load
        self._num_loading += 1
        self._begin_load(adapter)
        return True

    def _begin_load(self, adapter: _Adapter) -> None:
        adapter.memory = _Memory.LOADING
        if not adapter.is_passing:
            self._in_memory.add(adapter)
        self._loads.append(adapter.source)

    def _make_room(self, may_go: Callable[[_Adapter], bool]) -> bool:
        """Evict an adapter if memory is full: the least recently used one that no sequence waits for, else the least
        recently used. False: memory is full and none may be evicted.

        Args:
            may_go: whether an adapter may be evicted that is neither loading nor used by running sequences. A load for
                a request keeps the adapters that earlier requests wait for: otherwise requests would evict each
                other's adapters.
        """
        if len(self._in_memory) < self._num_resident:
            return True
        victims = [adapter for adapter in self._in_memory if not self._is_pinned(adapter) and may_go(adapter)]
        if not victims:
            return False
        victim = min(victims, key=lambda adapter: (self._num_waiting(adapter) > 0, adapter.last_used))
        self._num_evictions += 1
        self._evict(victim)
        return True

    def _is_pinned(self, adapter: _Adapter) -> bool:
        return adapter.memory is _Memory.LOADING or (adapter.slot is not None and bool(adapter.slot.running))

    def _evict(self, adapter: _Adapter) -> None:
        if adapter.slot is not None:
            adapter.slot.adapter = None
            adapter.slot = None
        if adapter.reserved is not None:
            adapter.reserved.cancel_reservation()
        adapter.memory = _Memory.ABSENT
        self._in_memory.remove(adapter)
        self._drops.append(adapter.source.number)

    def _forget(self, adapter: _Adapter) -> None:
        if adapter.memory is _Memory.RESIDENT:
            self._evict(adapter)
        if adapter.reserved is not None:
            adapter.reserved.cancel_reservation()
        self._num_removed -= adapter.is_removed
        del self._adapters[adapter.source.number]

    def _ended(self, number: int) -> _Adapter:
        adapter = self._adapters[number]
        assert adapter.memory is _Memory.LOADING
        self._has_news = True
        adapter.memory = _Memory.ABSENT
        self._in_memory.discard(adapter)
        if adapter.is_checking:
            self._is_checking = adapter.is_checking = False
        else:
            self._num_loading -= 1
        return adapter

    def _run(self, sequence: Sequence, slot: _Slot) -> None:
        assert slot.adapter is not None
        slot.running.add(sequence)
        sequence.adapter_slot = slot.index
        self._use(slot.adapter)

    def _use(self, adapter: _Adapter) -> None:
        self._uses += 1
        adapter.last_used = self._uses

    def _num_waiting(self, adapter: _Adapter) -> int:
        return self._waiting.num_of(adapter.source.number)
