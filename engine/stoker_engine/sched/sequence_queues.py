"""The sequences of an engine, and their transitions between the states listed in `scheduler`."""

from __future__ import annotations

from stoker_engine.contract.names import SchedulingPolicy
from stoker_engine.core.adapter import NO_ADAPTER
from stoker_engine.core.engine_request import EngineRequest
from stoker_engine.core.finish_reason import FinishReason
from stoker_engine.core.request import NO_ROW, Request, Sequence
from stoker_engine.core.step_report import SchedulerStats
from stoker_engine.sched.adapters import AdapterTable
from stoker_engine.sched.batch_changes import BatchChanges
from stoker_engine.sched.kv_manager import KVManager
from stoker_engine.sched.policy import WaitingQueue, arrival_key


class SequenceQueues:
    """Unfinished requests and their sequences.

    Args:
        max_num_seqs: maximum number of running sequences.
        policy: order of service.
        tells_sampled: see `BatchChanges`.
        max_loras: maximum number of adapters in a step; 0: each adapter's slot is its number.
        num_resident_adapters: maximum number of adapters in memory.

    Attributes:
        running: sequences that hold a row, in queue order; new forks are at the end until the next
            `Scheduler.schedule`.
        waiting: sequences to admit, in queue order.
        blocked_beams: requeued beams that have candidates and wait for the other beams of their search.
        requests: unfinished requests by id.
        rows: allocator of the runner's batch rows.
        adapters: table of the LoRA adapters; None if `max_loras` is 0.
        num_corrupted: number of requests that ended because of NaN or infinite logits.
    """

    def __init__(
        self,
        kv: KVManager,
        max_num_seqs: int,
        policy: SchedulingPolicy = "fcfs",
        tells_sampled: bool = False,
        max_loras: int = 0,
        num_resident_adapters: int = 0,
    ) -> None:
        self.kv = kv
        self.max_num_seqs = max_num_seqs
        self.running: list[Sequence] = []
        self.waiting = WaitingQueue()
        self.blocked_beams: list[Sequence] = []
        self.requests: dict[str, Request] = {}
        self.rows = BatchChanges(max_num_seqs, tells_sampled)
        self.adapters = AdapterTable(max_loras, num_resident_adapters, self.waiting) if max_loras else None
        self.num_preemptions = 0
        self.num_corrupted = 0
        self._policy = policy
        self._num_arrived = 0

    def add(self, spec: EngineRequest) -> Request:
        """Add a new request."""
        assert spec.id not in self.requests, f"request {spec.id} already exists"
        request = Request(spec, arrival_key(self._policy, spec, self._num_arrived))
        self._num_arrived += 1
        self.requests[spec.id] = request
        self.waiting.add(request.live[0])
        return request

    def finish(self, request_id: str, reason: FinishReason) -> Request | None:
        """End all unfinished sequences of a request, and return the request. None: the request is unknown."""
        request = self.requests.get(request_id)
        if request is not None:
            for sequence in list(request.live):
                self.end(sequence, reason)
        return request

    def stop(self, request_id: str, index: int) -> Request | None:
        """End one sequence at a stop string. Returns the request if that was its last unfinished sequence, else None.
        Ignored for beams."""
        request = self.requests.get(request_id)
        if request is None or request.beams is not None:
            return None
        for sequence in [sequence for sequence in request.live if sequence.index == index]:
            self.end(sequence, FinishReason.STOP)
        return None if request.live else request

    def stats(self) -> SchedulerStats:
        """Return a snapshot for the metrics."""
        return SchedulerStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting) + len(self.blocked_beams),
            kv_cache_usage=self.kv.usage,
            prefix_cache_queries=self.kv.queries,
            prefix_cache_hits=self.kv.hits,
            num_preemptions=self.num_preemptions,
            num_corrupted=self.num_corrupted,
            adapters=None if self.adapters is None else self.adapters.stats(),
        )

    def check(self) -> None:
        """Assert that requests, queues, rows and blocks are consistent."""
        live = [sequence for request in self.requests.values() for sequence in request.live]
        assert len(live) == len(self.running) + len(self.waiting) + len(self.blocked_beams)
        assert all(request.live for request in self.requests.values())
        assert all(sequence.row == NO_ROW or sequence in self.running for sequence in live)
        self.rows.check(self.running)
        if self.adapters is not None:
            self.adapters.check(self.running)
        self.kv.check(live)

    def start(self, sequence: Sequence, batch_index: int) -> None:
        """Move the waiting `sequence`, which has block tables, to `batch_index` of the running ones."""
        if sequence.request.spec.adapter != NO_ADAPTER:
            self._enter_slot(sequence)
        self.waiting.remove(sequence)
        self.running.insert(batch_index, sequence)
        self.rows.begin(sequence)

    def fork(self, parent: Sequence) -> Sequence:
        """Start a sequence with the known and computed tokens of `parent`. It waits, with no computed tokens, if the
        batch is full or `parent` has no blocks."""
        child = parent.request.start(parent.token_ids)
        parent.request.live.append(child)
        if parent.blocks and len(self.running) < self.max_num_seqs:
            self.kv.fork(parent, child)
            self.rows.fork(parent, child)
            if parent.adapter_slot != NO_ADAPTER:
                self._enter_slot(child, parent)
            self.running.append(child)
        else:
            self.waiting.add(child)
        return child

    def requeue(self, sequence: Sequence) -> None:
        """Free a running sequence's row and blocks, and move it to the waiting or blocked ones."""
        self.running.remove(sequence)
        self._reset(sequence)
        if sequence.candidates is None:
            self.waiting.add(sequence)
        else:
            self.blocked_beams.append(sequence)

    def end(self, sequence: Sequence, reason: FinishReason) -> None:
        """Remove a sequence; if it was its request's last unfinished one, also remove the request."""
        sequence.finish_reason = reason
        if sequence.row != NO_ROW:
            self.running.remove(sequence)
        elif sequence in self.blocked_beams:
            self.blocked_beams.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self._reset(sequence)
        sequence.request.live.remove(sequence)
        if not sequence.request.live:
            sequence.request.finish_reason = reason
            del self.requests[sequence.request.id]

    def _reset(self, sequence: Sequence) -> None:
        """Free row, blocks and adapter slot, and discard the results of steps in flight."""
        self.kv.free(sequence)
        self.rows.release(sequence)
        if sequence.adapter_slot != NO_ADAPTER:
            self._leave_slot(sequence)
        sequence.epoch += 1
        sequence.num_inflight_tokens = 0
        sequence.is_blocked = False
        sequence.request.num_forking = 0  # a request forks only while it has a single sequence

    def _enter_slot(self, sequence: Sequence, parent: Sequence | None = None) -> None:
        if self.adapters is None:
            sequence.adapter_slot = sequence.request.spec.adapter
        elif parent is None:
            self.adapters.enter(sequence)
        else:
            self.adapters.fork(parent, sequence)

    def _leave_slot(self, sequence: Sequence) -> None:
        if self.adapters is None:
            sequence.adapter_slot = NO_ADAPTER
        else:
            self.adapters.leave(sequence)
