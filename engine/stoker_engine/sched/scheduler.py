"""Continuous batching under one token budget.

Each step, requests catch up: every one has tokens known and tokens computed, and the step computes some of
the difference. Running requests come first, in order of arrival; what is left of the budget admits waiting
ones. A long prompt therefore runs in chunks beside other requests' new tokens, a prefix hit is a request that
starts with computed tokens, and a preempted request is one whose computed tokens went back to zero.

When blocks run out, the request that arrived last gives its blocks back and waits (preemption by recompute).
The first in line is never a victim, and `max_model_len` fits the pool, so every step makes progress.
"""

from __future__ import annotations

from collections.abc import Sequence

from stoker_engine.core.batch import ScheduledBatch, ScheduledSequence
from stoker_engine.core.observer import SchedulerStats
from stoker_engine.core.request import FinishReason, Request
from stoker_engine.sched.kv_manager import KVManager
from stoker_engine.sched.policy import FcfsQueue


class Scheduler:
    """Decides each step's batch. `schedule`, run the batch, `commit` its tokens; and again.

    Args:
        kv: the KV-cache blocks.
        max_num_seqs: most requests in a step.
        max_num_batched_tokens: most tokens in a step.
    """

    def __init__(self, kv: KVManager, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.kv = kv
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting = FcfsQueue()
        self.running: list[Request] = []
        self.requests: dict[str, Request] = {}
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        """Whether any request is running or waiting."""
        return bool(self.requests)

    def add(self, request: Request) -> None:
        """Takes in a new request."""
        assert request.id not in self.requests, f"request {request.id} is already here"
        self.requests[request.id] = request
        self.waiting.add(request)

    def finish(self, request_id: str, reason: FinishReason) -> Request | None:
        """Ends a request from outside (abort, stop string) and frees its blocks. None: it is not here."""
        request = self.requests.get(request_id)
        if request is None:
            return None
        request.finish_reason = reason
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self._forget(request)
        return request

    def schedule(self) -> ScheduledBatch:
        """The next step. Empty only if there is no work."""
        budget = self.max_num_batched_tokens
        shares: dict[str, int] = {}
        preemptions_before = self.num_preemptions

        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            num_tokens = min(request.num_uncomputed, budget)
            if not self._make_room(request, num_tokens):
                break  # it was itself the last in line, and is waiting again
            shares[request.id] = num_tokens
            budget -= num_tokens
            index += 1

        preempted = self.num_preemptions > preemptions_before  # then nobody new: blocks are short
        while not preempted and len(self.waiting) and budget > 0 and len(self.running) < self.max_num_seqs:
            request = self.waiting.peek()
            if not self.kv.admit(request):
                break
            self.waiting.pop()
            self.running.append(request)
            if request.num_cached is None:
                request.num_cached = request.num_computed
            num_tokens = min(request.num_uncomputed, budget)
            allocated = self.kv.allocate(request, num_tokens)
            assert allocated, "admitted without room"
            shares[request.id] = num_tokens
            budget -= num_tokens

        sequences = [self._scheduled(request, shares[request.id]) for request in self.running if request.id in shares]
        return ScheduledBatch(sequences, self.max_num_batched_tokens - budget)

    def commit(self, batch: ScheduledBatch, sampled: Sequence[int]) -> list[Request]:
        """Takes in a step's result: its tokens are computed, and each sampling request has a new token.

        Args:
            sampled: one token for each of ``batch.sampling``, in order.

        Returns:
            The requests that got a token. Those with a `finish_reason` are gone from here, blocks freed.
        """
        advanced = []
        tokens = iter(sampled)
        for sequence in batch.sequences:
            request = self.requests[sequence.request_id]
            request.num_computed = sequence.end
            if not sequence.samples:
                continue
            token_id = next(tokens)
            request.token_ids.append(token_id)
            request.stop_check(token_id)
            advanced.append(request)
            if request.finish_reason is not None:
                self.running.remove(request)
                self._forget(request)
        return advanced

    def stats(self) -> SchedulerStats:
        """A snapshot for the metrics."""
        return SchedulerStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            kv_cache_usage=self.kv.usage,
            prefix_cache_queries=self.kv.queries,
            prefix_cache_hits=self.kv.hits,
            num_preemptions=self.num_preemptions,
        )

    def check(self) -> None:
        """Asserts that requests, queues and blocks balance."""
        assert len(self.requests) == len(self.running) + len(self.waiting)
        self.kv.check(self.requests.values())

    def _make_room(self, request: Request, num_tokens: int) -> bool:
        """Allocates blocks for `request`, preempting from the end of the line. False: it came to itself."""
        while not self.kv.allocate(request, num_tokens):
            victim = self.running.pop()
            self.kv.free(victim)
            victim.num_preemptions += 1
            self.num_preemptions += 1
            self.waiting.put_back(victim)
            if victim is request:
                return False
        return True

    def _forget(self, request: Request) -> None:
        self.kv.free(request)
        del self.requests[request.id]

    @staticmethod
    def _scheduled(request: Request, num_tokens: int) -> ScheduledSequence:
        end = request.num_computed + num_tokens
        return ScheduledSequence(
            request_id=request.id,
            token_ids=request.token_ids[request.num_computed : end],
            start=request.num_computed,
            blocks=request.blocks,
            samples=end == len(request.token_ids),
            params=request.params,
            seed=request.seed,
        )
