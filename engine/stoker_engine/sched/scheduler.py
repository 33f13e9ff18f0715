"""Continuous batching under one token budget.

Each step, sequences catch up: every one has tokens known and tokens computed, and the step computes some of
the difference. Running sequences come first, in line (`policy`); what is left of the budget (`step_budget`) admits
waiting ones, and a prompt that runs lets those in that wait before it in line. A long prompt therefore runs in chunks
beside other sequences' new tokens, a prefix hit is a sequence that starts with computed tokens, and a preempted
sequence is one whose computed tokens went back to zero.

A sequence is in one of these states:

    state      row, blocks   leaves it when
    waiting    no            there is room: running
    running    yes           it ends; or blocks are short and it is the last in line: waiting, or parked
    parked     no            (a beam that has made its offer) the other beams of its search have, too: waiting
    ended      no            never

Steps may be in flight, launched and not yet committed. `schedule` may be called then, and looks ahead: what is in
flight counts as computed, a token being sampled as known. What cannot be foreseen waits for `commit`: forks, beams, and
how much of a draft holds. An end is not foreseen either, nor an abort or a request whose numbers are none: a sequence
has *lives* (`Sequence.life`), and what comes for one that is over is dropped.

When blocks run out, the last in line gives its blocks back and waits (preemption by recompute), once nothing is in
flight: what is may end sequences. The first in line is never a victim, and one request fits the pool, so every step
makes progress.
"""

from __future__ import annotations

import logging
from array import array
from typing import Final

from stoker_engine.contract.names import SchedulingPolicy
from stoker_engine.core.engine_request import EngineRequest
from stoker_engine.core.finish_reason import FinishReason
from stoker_engine.core.logprobs import TokenLogprobs
from stoker_engine.core.outputs import TokenDelta
from stoker_engine.core.proposer import Proposer
from stoker_engine.core.request import NO_ROW, Request, Sequence
from stoker_engine.core.step import Draft, Sampled, Step, StepResult
from stoker_engine.core.step_report import SchedulerStats
from stoker_engine.sched.kv_manager import KVManager
from stoker_engine.sched.policy import WaitingLine, place_in_line
from stoker_engine.sched.row_changes import RowChanges
from stoker_engine.sched.scheduled import Scheduled
from stoker_engine.sched.step_budget import StepBudget

logger = logging.getLogger(__name__)

#: Why a request ends whose logits are no numbers.
CORRUPTED: Final = (
    "the model computed no finite numbers for this request (nan or infinity in its logits); damaged weights do that, "
    "and float16 where the model needs the range of bfloat16 or float32"
)

#: Most tokens of a draft; a step computes all of them, and few of a long one hold.
MAX_DRAFT: Final = 8


class Scheduler:
    """Decides each step's batch. `schedule`, launch the step, collect its result, `commit` it; and again.

    Args:
        kv: the KV-cache blocks.
        max_num_seqs: most sequences in a step.
        max_num_batched_tokens: most tokens in a step.
        enable_chunked_prefill: whether a prompt may take several steps.
        long_prefill_token_threshold: most prompt tokens of a step while others decode; 0: what decodes leave.
        proposer: proposes drafts for sequences that decode.

    Attributes:
        running: sequences that hold blocks, in line.
        waiting: those that hold none, in line.
        parked: preempted beams that wait for the others of their search, and need no blocks until then.
        num_in_flight: steps scheduled and not yet committed.
    """

    def __init__(
        self,
        kv: KVManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        policy: SchedulingPolicy = "fcfs",
        enable_chunked_prefill: bool = True,
        long_prefill_token_threshold: int = 0,
        proposer: Proposer | None = None,
    ) -> None:
        self.kv = kv
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.running: list[Sequence] = []
        self.waiting = WaitingLine()
        self.parked: list[Sequence] = []
        self.requests: dict[str, Request] = {}
        self.num_in_flight = 0
        self.num_preemptions = 0
        self.num_corrupted = 0  # requests that ended because their logits were no numbers
        self._rows = RowChanges(max_num_seqs)
        self._policy = policy
        self._chunked = enable_chunked_prefill
        self._prompt_tokens = long_prefill_token_threshold
        self._proposer = proposer
        self._num_arrived = 0
        self._num_steps = 0
        self._must_commit = False  # before anything else is scheduled: blocks are short

    @property
    def has_work(self) -> bool:
        """Whether any request is here, or a step in flight."""
        return bool(self.requests) or self.num_in_flight > 0

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

    def schedule(self) -> Scheduled | None:
        """The next step. None if there is nothing to do, or not before a step in flight is committed."""
        if self._must_commit and self.num_in_flight:
            return None
        self._must_commit = False
        self.running.sort(key=lambda sequence: sequence.key)  # forks join at the end
        budget = StepBudget(self.running, self.max_num_batched_tokens, self._prompt_tokens, self._chunked)
        shares: dict[Sequence, int] = {}
        admitted: list[Request] = []
        preemptions_before = self.num_preemptions

        index, has_room = 0, True
        while index < len(self.running) and budget.tokens > 0:
            sequence = self.running[index]
            wanted = sequence.num_uncomputed
            if wanted > 1 and has_room and budget.prompts > 0 and self._is_overtaken(sequence):
                has_room = self._admit(budget, shares, admitted, index)
                index += has_room
                continue
            num_tokens = wanted if wanted <= 1 else budget.share(wanted)
            if num_tokens:
                if not self.kv.allocate(sequence, num_tokens, self._num_steps) and not self._make_room(
                    sequence, num_tokens
                ):
                    has_room = False
                    break  # it was itself the last in line, and is waiting again; or a step is to be committed first
                shares[sequence] = num_tokens
                budget.take(wanted, num_tokens)
            index += 1
            has_room = has_room and self.num_preemptions == preemptions_before  # blocks are short: nobody new

        while len(self.waiting) and budget.prompts > 0 and (has_room or not (shares or self.num_in_flight)):
            if self._admit(budget, shares, admitted, len(self.running)):
                continue
            if shares or not self.running or self.num_in_flight:
                break
            self._preempt()  # beams that wait for one which waits for their blocks

        if not shares:
            assert self.num_in_flight or not self.requests, "nothing to run, and yet there is work"
            return None
        return self._scheduled(shares, admitted, budget.tokens)

    def commit(self, scheduled: Scheduled, result: StepResult) -> list[TokenDelta]:
        """Takes in the result of the first step in flight: its tokens are computed, and sampling sequences have new
        ones.

        Returns:
            What is new. Sequences with a `finish_reason` are gone from here, blocks freed.
        """
        self.num_in_flight -= 1
        step = scheduled.step
        deltas = self._fail_corrupted(scheduled, result) if result.is_corrupted else []
        self.kv.prefix_cache.computed(step.number)
        searching: dict[Request, None] = {}
        drafts = {draft.place: len(draft.token_ids) for draft in step.drafts}
        sampled = iter(result.sampled)
        shares = zip(scheduled.sequences, scheduled.lives, step.starts, step.lengths, step.num_samples, strict=True)
        for place, (sequence, life, start, length, num_samples) in enumerate(shares):
            drawn = next(sampled) if num_samples else None
            if sequence.life != life:
                continue
            sequence.num_computed = start + length
            if result.prompt_logprobs:
                sequence.request.prompt_logprobs += result.prompt_logprobs.get(place) or []
            if drawn is None:
                continue
            if sequence.request.beams is not None:
                sequence.candidates = drawn.candidates
                searching[sequence.request] = None
                continue
            if place in drafts:
                self._judge_draft(sequence, drafts[place], drawn)
            deltas += self._take(sequence, drawn)
            if place in drafts and sequence.finish_reason is None:
                self.kv.trim(sequence)
        for request in searching:
            if request.live and all(beam.candidates is not None for beam in request.live):
                deltas += self._advance_beams(request)
        return deltas

    def abandon(self) -> None:
        """No step in flight has run to its end, and the runner's rows are not to be trusted: all sequences that run
        begin anew."""
        self.num_in_flight = 0
        self.kv.prefix_cache.forget_pending()
        for sequence in list(self.running):
            self._give_back(sequence)

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
        """Asserts that requests, queues, rows and blocks balance."""
        live = [sequence for request in self.requests.values() for sequence in request.live]
        assert len(live) == len(self.running) + len(self.waiting) + len(self.parked)
        assert all(request.live for request in self.requests.values())
        assert all(sequence.row == NO_ROW or sequence in self.running for sequence in live)
        self._rows.check(self.running)
        self.kv.check(live)

    def _scheduled(self, shares: dict[Sequence, int], admitted: list[Request], tokens_left: int) -> Scheduled:
        """The step of `shares`: what each sequence computes. From here on it is in flight."""
        drafts = self._drafts(shares, tokens_left) if self._proposer is not None else {}
        sequences = [s for s, num_tokens in shares.items() if num_tokens == 1 and s not in drafts]
        num_decodes = len(sequences)
        sequences += [s for s, num_tokens in shares.items() if num_tokens > 1 or s in drafts]
        starts, lengths, num_samples = array("i"), array("i"), array("i")
        of_drafts: list[Draft] = []
        num_prompt_tokens = 0
        for place, sequence in enumerate(sequences):
            request, start, length = sequence.request, sequence.num_launched, shares[sequence]
            sequence.num_launched = end = start + length
            starts.append(start)
            if start < request.num_prompt_tokens:
                num_prompt_tokens += min(end, request.num_prompt_tokens) - start
            if end < len(sequence.token_ids) + sequence.num_awaited:
                num_samples.append(0)
            elif request.beams is not None:
                num_samples.append(1)
            else:
                forks = request.num_to_fork if request.num_started < request.num_sequences else 0
                request.num_forking += forks
                num_samples.append(1 + forks)
                sequence.num_awaited += 1
                sequence.is_held = forks > 0 and self.kv.has_states  # a state that is ahead cannot be shared
                if sequence in drafts:
                    sequence.is_held = True
                    of_drafts.append(Draft(place, drafts[sequence]))
                    length += len(drafts[sequence])
            lengths.append(length)
        self._num_steps += 1
        self.num_in_flight += 1
        step = Step(
            number=self._num_steps - 1,
            rows=array("i", [sequence.row for sequence in sequences]),
            starts=starts,
            lengths=lengths,
            num_samples=num_samples,
            num_decodes=num_decodes,
            num_tokens=sum(lengths),
            tables=self.kv.take_table_changes(),
            copies=self.kv.take_copies(),
            drafts=of_drafts,
            **self._rows.take(),
        )
        return Scheduled(step, sequences, [sequence.life for sequence in sequences], admitted, num_prompt_tokens)

    def _drafts(self, shares: dict[Sequence, int], tokens_left: int) -> dict[Sequence, list[int]]:
        """What may follow sequences that decode, as far as it fits the budget, the blocks and the request."""
        assert self._proposer is not None
        drafts: dict[Sequence, list[int]] = {}
        if self.kv.has_states:  # of which nothing can be taken back
            return drafts
        for sequence, num_tokens in shares.items():
            request = sequence.request
            is_last = num_tokens == 1 and not sequence.num_awaited and sequence.num_uncomputed == 1
            most = min(MAX_DRAFT, tokens_left, request.max_length - sequence.num_known - 1)
            if not is_last or request.beams is not None or request.num_to_fork or most < 1:
                continue
            draft = self._proposer.propose(sequence.token_ids, most)[:most]
            if draft and self.kv.allocate(sequence, 1 + len(draft), self._num_steps):
                drafts[sequence] = draft
                tokens_left -= len(draft)
        return drafts

    def _is_overtaken(self, sequence: Sequence) -> bool:
        """Whether somebody who waits is before this prompt in line, and so is computed first."""
        return len(self.waiting) > 0 and self.waiting.first().key < sequence.key

    def _admit(self, budget: StepBudget, shares: dict[Sequence, int], admitted: list[Request], place: int) -> bool:
        """Lets in the first who waits, as number `place` of the running ones. False: there is no room."""
        sequence = self.waiting.first()
        if len(self.running) >= self.max_num_seqs or not self.kv.admit(sequence):
            return False
        wanted = sequence.num_uncomputed
        num_tokens = budget.share(wanted)
        if not num_tokens:
            self.kv.free(sequence)
            return False
        self.waiting.remove(sequence)
        self.running.insert(place, sequence)
        self._rows.begin(sequence)
        if sequence.request.num_cached is None:
            sequence.request.num_cached = sequence.num_computed
            self.kv.count_lookup(sequence)
            admitted.append(sequence.request)
        allocated = self.kv.allocate(sequence, num_tokens, self._num_steps)
        assert allocated, "admitted without room"
        shares[sequence] = num_tokens
        budget.take(wanted, num_tokens)
        return True

    def _make_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Allocates blocks for `sequence`, preempting from the end of the line. False: it came to itself, or must wait
        for a step in flight."""
        while not self.kv.allocate(sequence, num_tokens, self._num_steps):
            if self.num_in_flight:
                self._must_commit = True
                return False
            if self._preempt() is sequence:
                return False
        return True

    def _preempt(self) -> Sequence:
        """Takes the blocks of the last in line."""
        victim = self.running[-1]
        self._give_back(victim)
        victim.num_preemptions += 1
        victim.request.num_preemptions += 1
        self.num_preemptions += 1
        return victim

    def _give_back(self, sequence: Sequence) -> None:
        """`sequence`, which runs, has computed nothing any more, and waits."""
        self.running.remove(sequence)
        self._reset(sequence)
        if sequence.candidates is None:
            self.waiting.add(sequence)
        else:
            self.parked.append(sequence)

    def _reset(self, sequence: Sequence) -> None:
        """Takes row and blocks, and drops what is in flight."""
        self.kv.free(sequence)
        self._rows.release(sequence)
        sequence.life += 1
        sequence.num_awaited = 0
        sequence.is_held = False
        sequence.request.num_forking = 0  # while sequences are forking off this one, it is the only one

    def _judge_draft(self, sequence: Sequence, num_drafted: int, drawn: Sampled) -> None:
        """Keeps of a draft what the model drew itself."""
        [held] = drawn.token_ids
        sequence.num_computed -= num_drafted - (len(held) - 1)
        sequence.num_launched = sequence.num_computed

    def _take(self, sequence: Sequence, drawn: Sampled) -> list[TokenDelta]:
        """Gives `sequence` its new tokens; the first time, the request's other sequences fork from it."""
        sequence.num_awaited -= 1
        sequence.is_held = False
        children = drawn.token_ids
        if len(children) == 1:
            return [self._grow(sequence, children[0], drawn.logprobs[0] if drawn.logprobs else None)]
        sequence.request.num_forking = 0
        family = [sequence, *(self._fork(sequence) for _ in children[1:])]
        deltas = []
        for index, (member, token_ids) in enumerate(zip(family, children, strict=True)):
            deltas.append(self._grow(member, token_ids, drawn.logprobs[index] if drawn.logprobs else None))
            if member is not sequence:
                self._rows.write(member)
        return deltas

    def _grow(self, sequence: Sequence, token_ids: list[int], logprobs: list[TokenLogprobs] | None) -> TokenDelta:
        """Appends new tokens up to the one that ends the sequence, if one does."""
        request = sequence.request
        is_first = sequence.index == 0 and len(sequence.token_ids) == request.num_prompt_tokens
        for count, token_id in enumerate(token_ids, 1):
            sequence.append(token_id)
            if sequence.finish_reason is not None and count < len(token_ids):
                token_ids = token_ids[:count]
                logprobs = None if logprobs is None else logprobs[:count]
                break
        self.kv.computed(sequence)
        if sequence.finish_reason is not None:
            self._end(sequence, sequence.finish_reason)
        return TokenDelta(
            request.id,
            sequence.index,
            token_ids,
            sequence.finish_reason,
            sequence.stop_reason,
            logprobs,
            request.prompt_logprobs if is_first and request.wants_prompt_logprobs else None,
            num_cached_tokens=request.num_cached or 0,
        )

    def _fail_corrupted(self, scheduled: Scheduled, result: StepResult) -> list[TokenDelta]:
        """Ends requests whose logits are no numbers. Nobody is to find in the prefix cache what they computed, and who
        already shares what this step or a later one was to compute begins anew."""
        corrupted: dict[Request, None] = {}
        sampled = iter(result.sampled)
        shares = zip(scheduled.sequences, scheduled.lives, scheduled.step.num_samples, strict=True)
        for place, (sequence, life, num_samples) in enumerate(shares):
            drawn = next(sampled) if num_samples else None
            is_corrupted = result.prompt_logprobs.get(place, ()) is None or (drawn is not None and drawn.is_corrupted)
            if is_corrupted and sequence.life == life:
                corrupted[sequence.request] = None
        pending = {block for request in corrupted for s in request.live for block in self.kv.forget(s)}
        deltas = [delta for request in corrupted for delta in self._fail(request)]
        for sequence in list(self.running):
            if not pending.isdisjoint(block for table in sequence.blocks for block in table):
                self._give_back(sequence)
        return deltas

    def _fail(self, request: Request) -> list[TokenDelta]:
        """Ends a request whose logits are no numbers."""
        logger.error("request %s: %s", request.id, CORRUPTED)
        self.num_corrupted += 1
        unfinished = [sequence.index for sequence in request.live]
        if request.beams is not None:
            unfinished = list(range(request.asked.num_sequences))
        else:
            unfinished += range(request.num_started, request.asked.num_sequences)
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
            children.append(child)
        for child, following_beam in zip(children, following, strict=True):
            child.token_ids = [*known[following_beam.parent], following_beam.token_id]
            self._rows.write(child)
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
        child = parent.request.start(parent.token_ids)
        parent.request.live.append(child)
        if parent.blocks and len(self.running) < self.max_num_seqs:
            self.kv.fork(parent, child)
            self._rows.fork(parent, child)
            self.running.append(child)
        else:
            self.waiting.add(child)
        return child

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        """Takes a sequence out, and its request with the last one."""
        sequence.finish_reason = reason
        if sequence.row != NO_ROW:
            self.running.remove(sequence)
        elif sequence in self.parked:
            self.parked.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self._reset(sequence)
        sequence.request.live.remove(sequence)
        if not sequence.request.live:
            sequence.request.finish_reason = reason
            del self.requests[sequence.request.id]
