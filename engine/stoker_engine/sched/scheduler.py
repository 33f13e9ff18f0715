"""Continuous batching under one token budget.

Each step, sequences catch up: every one has tokens known and tokens computed, and the step computes some of
the difference. Running sequences come first, in line (`policy`); what is left of the budget (`step_budget`) admits
waiting ones, and a prompt that runs lets those in that wait before it in line. A long prompt therefore runs in chunks
beside other sequences' new tokens, a prefix hit is a sequence that starts with computed tokens, and a preempted
sequence is one whose computed tokens went back to zero.

When blocks run out, the last in line gives its blocks back and waits (preemption by recompute). The first in line
is never a victim, and one request fits the pool, so every step makes progress.
"""

from __future__ import annotations

import logging
from typing import Final

from stoker_engine.contract.names import SchedulingPolicy
from stoker_engine.core.batch import Sampled, ScheduledBatch, ScheduledSequence, StepResult
from stoker_engine.core.engine_request import EngineRequest
from stoker_engine.core.finish_reason import FinishReason
from stoker_engine.core.outputs import TokenDelta
from stoker_engine.core.request import Request, Sequence
from stoker_engine.core.sampling_params import SamplingParams
from stoker_engine.core.step_report import SchedulerStats
from stoker_engine.sched.kv_manager import KVManager
from stoker_engine.sched.policy import WaitingLine, place_in_line
from stoker_engine.sched.step_budget import StepBudget

logger = logging.getLogger(__name__)

#: Why a request ends whose logits are no numbers.
CORRUPTED: Final = (
    "the model computed no finite numbers for this request (nan or infinity in its logits); damaged weights do that, "
    "and float16 where the model needs the range of bfloat16 or float32"
)


class Scheduler:
    """Decides each step's batch. `schedule`, run the batch, `commit` its result; and again.

    Args:
        kv: the KV-cache blocks.
        max_num_seqs: most sequences in a step.
        max_num_batched_tokens: most tokens in a step.
        enable_chunked_prefill: whether a prompt may take several steps.
        long_prefill_token_threshold: most prompt tokens of a step while others decode; 0: what decodes leave.

    Attributes:
        running: sequences that hold blocks, in line.
        waiting: those that hold none, in line.
        parked: preempted beams that wait for the others of their search, and need no blocks until then.
    """

    def __init__(
        self,
        kv: KVManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        policy: SchedulingPolicy = "fcfs",
        enable_chunked_prefill: bool = True,
        long_prefill_token_threshold: int = 0,
    ) -> None:
        self.kv = kv
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.running: list[Sequence] = []
        self.waiting = WaitingLine()
        self.parked: list[Sequence] = []
        self.requests: dict[str, Request] = {}
        self.num_preemptions = 0
        self.num_corrupted = 0  # requests that ended because their logits were no numbers
        self._policy = policy
        self._chunked = enable_chunked_prefill
        self._prompt_tokens = long_prefill_token_threshold
        self._num_arrived = 0

    @property
    def has_work(self) -> bool:
        """Whether any request is here."""
        return bool(self.requests)

    def add(self, asked: EngineRequest) -> Request:
        """Takes in a new request."""
        assert asked.id not in self.requests, f"request {asked.id} is already here"
        request = Request(asked, place_in_line(self._policy, asked, self._num_arrived))
        self._num_arrived += 1
        self.requests[asked.id] = request
        self.waiting.add(request.live[0])
        return request

    def finish(self, request_id: str, reason: FinishReason) -> Request | None:
        """Ends a request from outside and frees its blocks. None: it is not here."""
        request = self.requests.get(request_id)
        if request is not None:
            for sequence in list(request.live):
                self._end(sequence, reason)
        return request

    def stop(self, request_id: str, index: int) -> Request | None:
        """Ends one sequence at a stop string. The request is returned if that was its last one."""
        request = self.requests.get(request_id)
        if request is None or request.beams is not None:
            return None
        for sequence in [sequence for sequence in request.live if sequence.index == index]:
            self._end(sequence, FinishReason.STOP)
        return None if request.live else request

    def schedule(self) -> ScheduledBatch:
        """The next step. Empty only if there is no work."""
        self.running.sort(key=lambda sequence: sequence.key)  # forks join at the end
        budget = StepBudget(self.running, self.max_num_batched_tokens, self._prompt_tokens, self._chunked)
        shares: dict[str, int] = {}
        preemptions_before = self.num_preemptions

        index, has_room = 0, True
        while index < len(self.running) and budget.tokens > 0:
            sequence = self.running[index]
            if has_room and budget.prompts > 0 and self._is_overtaken(sequence):
                has_room = self._admit(budget, shares, index)
                index += has_room
                continue
            num_tokens = budget.share(sequence)
            if num_tokens:
                if not self._make_room(sequence, num_tokens):
                    has_room = False
                    break  # it was itself the last in line, and is waiting again
                shares[sequence.id] = num_tokens
                budget.take(sequence, num_tokens)
            index += 1
            has_room = has_room and self.num_preemptions == preemptions_before  # blocks are short: nobody new

        while len(self.waiting) and budget.prompts > 0 and (has_room or not shares):
            if self._admit(budget, shares, len(self.running)):
                continue
            if shares or not self.running:
                break
            self._preempt()  # beams that wait for one which waits for their blocks

        assert shares or not self.requests, "nothing to run, and yet there is work"
        sequences = [_scheduled(sequence, shares[sequence.id]) for sequence in self.running if sequence.id in shares]
        return ScheduledBatch(sequences, self.max_num_batched_tokens - budget.tokens, self.kv.take_copies())

    def commit(self, batch: ScheduledBatch, result: StepResult) -> list[TokenDelta]:
        """Takes in a step's result: its tokens are computed, and sampling sequences have new ones.

        Returns:
            What is new. Sequences with a `finish_reason` are gone from here, blocks freed.
        """
        deltas: list[TokenDelta] = []
        by_id = {sequence.id: sequence for sequence in self.running}
        searching: dict[str, Request] = {}
        corrupted: dict[str, Request] = {}
        sampled = iter(result.sampled)
        for scheduled in batch.sequences:
            sequence = by_id[scheduled.id]
            sequence.num_computed = scheduled.end
            prompt_logprobs = result.prompt_logprobs.get(scheduled.id, [])
            sequence.request.prompt_logprobs += prompt_logprobs or []
            drawn = next(sampled) if scheduled.num_samples else None
            if prompt_logprobs is None or (drawn is not None and drawn.is_corrupted):
                corrupted[sequence.request.id] = sequence.request
            elif drawn is None:
                continue
            elif sequence.request.beams is not None:
                sequence.candidates = drawn.candidates
                searching[sequence.request.id] = sequence.request
            else:
                deltas += self._take(sequence, drawn)
        for request in corrupted.values():
            deltas += self._fail(request)
        for request in searching.values():
            if request.live and all(beam.candidates is not None for beam in request.live):
                deltas += self._advance_beams(request)
        return deltas

    def stats(self) -> SchedulerStats:
        """A snapshot for the metrics."""
        return SchedulerStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting) + len(self.parked),
            kv_cache_usage=self.kv.usage,
            prefix_cache_queries=self.kv.queries,
            prefix_cache_hits=self.kv.hits,
            num_preemptions=self.num_preemptions,
            num_corrupted=self.num_corrupted,
        )

    def check(self) -> None:
        """Asserts that requests, queues and blocks balance."""
        live = [sequence for request in self.requests.values() for sequence in request.live]
        assert len(live) == len(self.running) + len(self.waiting) + len(self.parked)
        assert all(request.live for request in self.requests.values())
        self.kv.check(live)

    def _is_overtaken(self, sequence: Sequence) -> bool:
        """Whether somebody who waits is before this prompt in line, and so is computed first."""
        return sequence.num_uncomputed > 1 and len(self.waiting) > 0 and self.waiting.first().key < sequence.key

    def _admit(self, budget: StepBudget, shares: dict[str, int], place: int) -> bool:
        """Lets in the first who waits, as number `place` of the running ones. False: there is no room."""
        sequence = self.waiting.first()
        if len(self.running) >= self.max_num_seqs or not self.kv.admit(sequence):
            return False
        num_tokens = budget.share(sequence)
        if not num_tokens:
            self.kv.free(sequence)
            return False
        self.waiting.remove(sequence)
        self.running.insert(place, sequence)
        if sequence.request.num_cached is None:
            sequence.request.num_cached = sequence.num_computed
            self.kv.count_lookup(sequence)
        allocated = self.kv.allocate(sequence, num_tokens)
        assert allocated, "admitted without room"
        shares[sequence.id] = num_tokens
        budget.take(sequence, num_tokens)
        return True

    def _make_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Allocates blocks for `sequence`, preempting from the end of the line. False: it came to itself."""
        while not self.kv.allocate(sequence, num_tokens):
            if self._preempt() is sequence:
                return False
        return True

    def _preempt(self) -> Sequence:
        """Takes the blocks of the last in line."""
        victim = self.running.pop()
        self.kv.free(victim)
        victim.num_preemptions += 1
        victim.request.num_preemptions += 1
        self.num_preemptions += 1
        if victim.candidates is None:
            self.waiting.add(victim)
        else:
            self.parked.append(victim)
        return victim

    def _take(self, sequence: Sequence, drawn: Sampled) -> list[TokenDelta]:
        """Gives `sequence` its new token; the first time, the request's other sequences fork from it."""
        request = sequence.request
        family = [sequence] + [self._fork(sequence) for _ in range(request.num_to_fork)]
        deltas = []
        for place, (member, token_id) in enumerate(zip(family, drawn.token_ids, strict=True)):
            is_first = member.index == 0 and member.num_output_tokens == 0
            member.append(token_id)
            if member.finish_reason is not None:
                self._end(member, member.finish_reason)
            deltas.append(
                TokenDelta(
                    request_id=request.id,
                    index=member.index,
                    token_ids=[token_id],
                    finish_reason=member.finish_reason,
                    stop_reason=member.stop_reason,
                    logprobs=None if drawn.logprobs is None else [drawn.logprobs[place]],
                    prompt_logprobs=request.prompt_logprobs if is_first and request.wants_prompt_logprobs else None,
                    num_cached_tokens=request.num_cached or 0,
                )
            )
        return deltas

    def _fail(self, request: Request) -> list[TokenDelta]:
        """Ends a request whose logits are no numbers; nobody is to find what it computed in the prefix cache."""
        logger.error("request %s: %s", request.id, CORRUPTED)
        self.num_corrupted += 1
        unfinished = [sequence.index for sequence in request.live]
        if request.beams is not None:
            unfinished = list(range(request.asked.num_sequences))
        else:
            unfinished += range(request.num_started, request.asked.num_sequences)
        for sequence in request.live:
            self.kv.forget(sequence)
        self.finish(request.id, FinishReason.ERROR)
        return [TokenDelta(request.id, index, [], FinishReason.ERROR, error=CORRUPTED) for index in unfinished]

    def _advance_beams(self, request: Request) -> list[TokenDelta]:
        """Every beam has made its offer: the best go on, by forks of their parents."""
        assert request.beams is not None
        beams = request.live
        outputs = [beam.output_token_ids for beam in beams]
        following = request.beams.advance([beam.candidates or [] for beam in beams], outputs)
        known = [list(beam.token_ids) for beam in beams]
        heirs: dict[int, Sequence] = {}  # a parent goes on in place as its first child
        children = []
        for following_beam in following:
            parent = beams[following_beam.parent]
            child = self._fork(parent) if following_beam.parent in heirs else parent
            heirs.setdefault(following_beam.parent, child)
            child.token_ids = [*known[following_beam.parent], following_beam.token_id]
            children.append(child)
        for beam in beams:
            beam.candidates = None
            if beam in self.parked and beam in children:
                self.parked.remove(beam)
                self.waiting.add(beam)
        if not following:
            deltas = [
                TokenDelta(
                    request_id=request.id,
                    index=index,
                    token_ids=beam.token_ids,
                    finish_reason=FinishReason.STOP if beam.ended else FinishReason.LENGTH,
                    cumulative_logprob=beam.cumulative_logprob,
                    num_cached_tokens=request.num_cached or 0,
                )
                for index, beam in enumerate(request.beams.finished)
            ]
            self.finish(request.id, deltas[0].finish_reason or FinishReason.STOP)
            return deltas
        for beam in [beam for beam in beams if beam not in children]:
            self._end(beam, FinishReason.STOP)
        request.live = children
        return []

    def _fork(self, parent: Sequence) -> Sequence:
        """A sequence that knows and has computed the same; it waits if there is no place in the batch."""
        child = parent.request.start(parent.token_ids, None if parent.counts is None else parent.counts.copy())
        parent.request.live.append(child)
        if parent.blocks and len(self.running) < self.max_num_seqs:
            self.kv.fork(parent, child)
            self.running.append(child)
        else:
            self.waiting.add(child)
        return child

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        """Takes a sequence out, and its request with the last one."""
        sequence.finish_reason = reason
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.parked:
            self.parked.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self.kv.free(sequence)
        sequence.request.live.remove(sequence)
        if not sequence.request.live:
            sequence.request.finish_reason = reason
            del self.requests[sequence.request.id]


def _scheduled(sequence: Sequence, num_tokens: int) -> ScheduledSequence:
    request, asked = sequence.request, sequence.request.asked
    params = asked.params
    end = sequence.num_computed + num_tokens
    samples = end == len(sequence.token_ids)
    return ScheduledSequence(
        id=sequence.id,
        token_ids=sequence.token_ids[sequence.num_computed : end],
        start=sequence.num_computed,
        blocks=sequence.blocks,
        num_samples=1 + request.num_to_fork if samples else 0,
        params=params,
        seed=asked.seed + sequence.index,
        known=sequence.token_ids,
        num_prompt_tokens=request.num_prompt_tokens,
        rules=request.rules,
        counts=sequence.counts,
        may_end=not isinstance(params, SamplingParams) or sequence.num_output_tokens >= params.min_tokens,
        num_candidates=request.beams.num_candidates if request.beams else 0,
        num_prompt_logprobs=len(request.prompt_logprobs),
        request_id=request.id,
    )
