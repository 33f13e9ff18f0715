"""Continuous batching under one token budget.

Each step, sequences catch up: every one has tokens known and tokens computed, and the step computes some of
the difference. Running sequences come first, in line (`policy`); what is left of the budget (`step_budget`) admits
waiting ones, and a prompt that runs lets those in that wait before it in line. A long prompt therefore runs in chunks
beside other sequences' new tokens, a prefix hit is a sequence that starts with computed tokens, and a preempted
sequence is one whose computed tokens went back to zero.

A sequence is in one of these states (`queues` moves it from one to another):

    state      row, blocks   leaves it when
    waiting    no            there is room: running
    running    yes           it ends; or blocks are short and it is the last in line: waiting, or blocked
    blocked    no            (a beam that has made its offer) the other beams of its search have, too: waiting
    ended      no            never

Steps may be in flight, launched and not yet committed. `schedule` may be called then, and looks ahead: what is in
flight counts as computed, a token being sampled as known. What cannot be foreseen waits for `commit`: forks, beams, and
how much of a draft holds; in a pipeline, whose stages must be told of it, each sampled token. An end is not foreseen
either, nor an abort or a request whose numbers are none: each sequence has an *epoch* (`Sequence.epoch`), and results
of an earlier one are discarded.

When blocks run out, the last in line gives its blocks back and waits (`preemption`), once nothing is in flight.

A sequence that waits for its LoRA adapter (`adapters`) is passed over.
"""

from __future__ import annotations

from array import array
from typing import Final

from stoker_engine.contract.names import SchedulingPolicy
from stoker_engine.core.outputs import TokenDelta
from stoker_engine.core.proposer import Proposer
from stoker_engine.core.request import Request, Sequence
from stoker_engine.core.step import Draft, Step, StepResult
from stoker_engine.sched.commit import commit
from stoker_engine.sched.kv_manager import KVManager
from stoker_engine.sched.preemption import make_room, preempt_last
from stoker_engine.sched.scheduled import Scheduled
from stoker_engine.sched.sequence_queues import SequenceQueues
from stoker_engine.sched.step_budget import PromptLimits, StepBudget
from stoker_engine.sched.step_cost import StepCost, StepWork

#: Most tokens of a draft; a step computes all of them, and few of a long one hold.
MAX_DRAFT: Final = 8


class Scheduler(SequenceQueues):
    """Decides each step's batch. `schedule`, launch the step, collect its result, `commit` it; and again.

    Args:
        kv: the KV-cache blocks.
        max_num_seqs: most sequences in a step.
        max_num_batched_tokens: most tokens in a step.
        enable_chunked_prefill: whether a prompt may take several steps.
        long_prefill_token_threshold: most prompt tokens of a step while others decode; 0: what decodes leave; None:
            time decides.
        max_itl: seconds between two tokens of a stream, to which steps with prompts keep; see `step_budget`.
        proposer: proposes drafts for sequences that decode.
        num_batches: more than one: so many steps are in flight in a pipeline, each for other sequences.
        max_loras, num_resident_adapters: see `SequenceQueues`.

    Attributes:
        num_in_flight: steps scheduled and not yet committed.
    """

    def __init__(
        self,
        kv: KVManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        policy: SchedulingPolicy = "fcfs",
        enable_chunked_prefill: bool = True,
        long_prefill_token_threshold: int | None = None,
        max_itl: float | None = None,
        proposer: Proposer | None = None,
        num_batches: int = 1,
        max_loras: int = 0,
        num_resident_adapters: int = 0,
    ) -> None:
        super().__init__(kv, max_num_seqs, policy, num_batches > 1, max_loras, num_resident_adapters)
        self._num_batches = num_batches
        self.max_num_batched_tokens = max_num_batched_tokens
        self.num_in_flight = 0
        self._limits = PromptLimits(long_prefill_token_threshold, max_itl, enable_chunked_prefill, kv.block_size)
        self._cost = StepCost()
        self._proposer = proposer
        self._num_steps = 0
        self._must_commit = False  # before anything else is scheduled: blocks are short

    @property
    def has_work(self) -> bool:
        """Whether any request is here, or a step in flight."""
        return bool(self.requests) or self.num_in_flight > 0

    def schedule(self) -> Scheduled | None:
        """The next step. None if there is nothing to do, or not before a step in flight is committed."""
        if self._must_commit and self.num_in_flight:
            return None
        self._must_commit = False
        if self.adapters is not None:
            self.adapters.begin_pass()
        self.running.sort(key=lambda sequence: sequence.sort_key)  # forks join at the end
        budget = StepBudget(
            self.running,
            self.max_num_batched_tokens,
            self._limits,
            self._cost,
            self._num_batches,
            self._num_batches - self.num_in_flight,
        )
        shares: dict[Sequence, int] = {}
        admitted: list[Request] = []
        preemptions_before = self.num_preemptions

        index, has_room = 0, True
        while index < len(self.running) and budget.tokens > 0:
            sequence = self.running[index]
            num_uncomputed = sequence.num_uncomputed
            if num_uncomputed > 1 and has_room and budget.prompts > 0 and self._is_overtaken(sequence):
                has_room = self._admit(budget, shares, admitted, index)
                index += has_room
                continue
            num_tokens = (
                budget.decode(num_uncomputed)
                if num_uncomputed <= 1
                else budget.share(num_uncomputed, sequence.num_launched)
            )
            if num_tokens:
                if not self.kv.allocate(sequence, num_tokens, self._num_steps):
                    self._must_commit = self.num_in_flight > 0
                    if self._must_commit or not make_room(self, sequence, num_tokens, self._num_steps):
                        has_room = False
                        break
                shares[sequence] = num_tokens
                budget.spend(num_uncomputed, num_tokens, sequence.num_launched)
            index += 1
            has_room = has_room and self.num_preemptions == preemptions_before  # blocks are short: nobody new

        while len(self.waiting) and budget.prompts > 0 and (has_room or not (shares or self.num_in_flight)):
            if self._admit(budget, shares, admitted, len(self.running)):
                continue
            if shares or not self.running or self.num_in_flight or self._first_waiting() is None:
                break
            preempt_last(self)  # beams that wait for one which waits for their blocks

        if not shares:
            assert self.num_in_flight or not self.requests or self._is_loading, "nothing to run, and yet there is work"
            return None
        return self._scheduled(shares, admitted, budget.tokens)

    def commit(self, scheduled: Scheduled, result: StepResult, seconds: float = 0.0) -> list[TokenDelta]:
        """Takes in the result of the first step in flight: its tokens are computed, and sampling sequences have new
        ones.

        Args:
            seconds: that it took, or with others in flight, that it came after the one before; 0: not measured.

        Returns:
            What is new. Sequences with a `finish_reason` are gone from here, blocks freed.
        """
        self.num_in_flight -= 1
        self._cost.observe(scheduled.work, seconds)
        return commit(self, scheduled, result)

    def discard_in_flight(self) -> None:
        """No step in flight has run to its end, and the runner's rows are not to be trusted: all sequences that run
        start again."""
        self.num_in_flight = 0
        self.kv.prefix_cache.forget_pending()
        for sequence in list(self.running):
            self.requeue(sequence)
        self.kv.pop_copies()
        self.kv.pop_table_changes()
        if self.adapters is not None:
            self.adapters.discard_slots()

    def _scheduled(self, shares: dict[Sequence, int], admitted: list[Request], tokens_left: int) -> Scheduled:
        """The step of `shares`: what each sequence computes. From here on it is in flight."""
        drafts = self._drafts(shares, tokens_left) if self._proposer is not None else {}
        sequences = [s for s, num_tokens in shares.items() if num_tokens == 1 and s not in drafts]
        num_decodes = len(sequences)
        sequences += [s for s, num_tokens in shares.items() if num_tokens > 1 or s in drafts]
        starts, lengths, num_samples = array("i"), array("i"), array("i")
        of_drafts: list[Draft] = []
        num_prompt_tokens = work_tokens = num_pairs = 0
        for batch_index, sequence in enumerate(sequences):
            request, start, length = sequence.request, sequence.num_launched, shares[sequence]
            if length > 1:
                work_tokens += length
                num_pairs += length * (2 * start + length)
            sequence.num_launched = end = start + length
            starts.append(start)
            if start < request.num_prompt_tokens:
                num_prompt_tokens += min(end, request.num_prompt_tokens) - start
            if end < len(sequence.token_ids) + sequence.num_inflight_tokens:
                num_samples.append(0)
            elif request.beams is not None:
                num_samples.append(1)
            else:
                forks = request.num_to_fork if request.num_started < request.num_sequences else 0
                request.num_forking += forks
                num_samples.append(1 + forks)
                sequence.num_inflight_tokens += 1
                # A state that is ahead cannot be shared.
                sequence.is_blocked = self._num_batches > 1 or (forks > 0 and self.kv.has_states)
                if sequence in drafts:
                    sequence.is_blocked = True
                    of_drafts.append(Draft(batch_index, drafts[sequence]))
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
            tables=self.kv.pop_table_changes(),
            copies=self.kv.pop_copies(),
            drafts=of_drafts,
            adapters=self.adapters.pop_changes() if self.adapters is not None else [],
            **self.rows.pop(),
        )
        work = StepWork(work_tokens, num_pairs, step.num_tokens - work_tokens)
        return Scheduled(step, sequences, [sequence.epoch for sequence in sequences], admitted, num_prompt_tokens, work)

    def _drafts(self, shares: dict[Sequence, int], tokens_left: int) -> dict[Sequence, list[int]]:
        """What may follow sequences that decode, as far as it fits the budget, the blocks and the request."""
        assert self._proposer is not None
        drafts: dict[Sequence, list[int]] = {}
        if self.kv.has_states:  # of which nothing can be taken back
            return drafts
        for sequence, num_tokens in shares.items():
            request = sequence.request
            is_last = num_tokens == 1 and not sequence.num_inflight_tokens and sequence.num_uncomputed == 1
            max_drafted = min(MAX_DRAFT, tokens_left, request.max_length - sequence.num_known - 1)
            if not is_last or request.beams is not None or request.num_to_fork or max_drafted < 1:
                continue
            draft = self._proposer.propose(sequence.token_ids, max_drafted)[:max_drafted]
            if draft and self.kv.allocate(sequence, 1 + len(draft), self._num_steps):
                drafts[sequence] = draft
                tokens_left -= len(draft)
        return drafts

    def _is_overtaken(self, sequence: Sequence) -> bool:
        """Whether somebody who waits is before this prompt in line, and so is computed first."""
        waiting = self._first_waiting()
        return waiting is not None and waiting.sort_key < sequence.sort_key

    def _first_waiting(self) -> Sequence | None:
        """The first who waits, and not for an adapter."""
        if self.adapters is not None:
            return self.adapters.first_waiting()
        return self.waiting.first() if len(self.waiting) else None

    @property
    def _is_loading(self) -> bool:
        return self.adapters is not None and self.adapters.is_loading

    def _admit(
        self, budget: StepBudget, shares: dict[Sequence, int], admitted: list[Request], batch_index: int
    ) -> bool:
        """Lets in the first who waits, and not for an adapter, as number `batch_index` of the running ones. False:
        there is no room."""
        sequence = self._first_waiting()  # also where there is no room: the loads that others wait for begin
        if sequence is None or len(self.running) >= self.max_num_seqs or not self.kv.admit(sequence):
            return False
        num_uncomputed = sequence.num_uncomputed
        num_tokens = budget.share(num_uncomputed, sequence.num_launched)
        if not num_tokens:
            self.kv.free(sequence)
            return False
        self.start(sequence, batch_index)
        if sequence.request.num_cached is None:
            sequence.request.num_cached = sequence.num_computed
            self.kv.count_lookup(sequence)
            admitted.append(sequence.request)
        allocated = self.kv.allocate(sequence, num_tokens, self._num_steps)
        assert allocated, "admitted without room"
        shares[sequence] = num_tokens
        budget.spend(num_uncomputed, num_tokens, sequence.num_launched)
        return True
