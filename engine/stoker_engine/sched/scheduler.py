"""Continuous batching under one token budget.

In each step, sequences catch up: each has known tokens and computed tokens, and the step computes part of the
difference. Running sequences come first, in queue order (`policy`); the remaining budget (`step_budget`) admits waiting
ones. Before a running prompt gets tokens, waiting sequences that precede it in queue order are admitted if possible. A
long prompt therefore runs in chunks beside other sequences' new tokens, a prefix hit is a sequence that starts with
computed tokens, and a preempted sequence is one whose number of computed tokens was reset to zero.

A sequence is in one of these states (`sequence_queues` moves it from one to another):

    state      row, blocks   transition
    waiting    no            to running, when blocks, a row and budget are free
    running    yes           to ended; if blocks run out and it is the last in order: to waiting or blocked
    blocked    no            (preempted beam) to waiting or ended, when all beams of its search have candidates
    ended      no            none

An abort or an error ends a sequence in any state. Failed steps and corrupted shared blocks also requeue running ones.

Several steps may be in flight: launched and not yet committed. `schedule` then looks ahead: launched tokens count as
computed, and tokens being sampled count as known. These must wait for `commit`: forks, beams and tokens after a draft;
in a pipeline, whose stages receive sampled tokens with the next step, tokens after each sampled one. Finishes, aborts
and NaN logits cannot be predicted, so each sequence has an *epoch* (`Sequence.epoch`), and results from an older epoch
are discarded.

When blocks run out, the last running sequence in queue order is preempted (`preemption`), once no step is in flight.

A sequence that waits for its LoRA adapter (`adapters`) is skipped.
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

#: Maximum length of a draft. A step computes all drafted tokens, and few tokens of a long draft are accepted.
MAX_DRAFT: Final = 8


class Scheduler(SequenceQueues):
    """Decides each step's batch. The caller repeats: `schedule`, launch the step, collect its result, `commit`.

    Args:
        max_num_seqs: maximum number of running sequences.
        max_num_batched_tokens: maximum number of tokens in a step.
        enable_chunked_prefill: whether a prompt may take several steps.
        long_prefill_token_threshold: maximum number of prompt tokens in a step while sequences decode; 0: all that
            decodes leave; None: limited by time.
        max_itl: limit of the inter-token latency, in seconds, for steps with prompts; see `step_budget`.
        proposer: proposes drafts for sequences that decode.
        num_batches: maximum number of steps in flight in a pipeline, each with other sequences; 1: no pipeline.
        max_loras, num_resident_adapters: see `SequenceQueues`.

    Attributes:
        num_in_flight: number of steps scheduled and not yet committed.
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
        self._must_commit = False  # blocks have run out: commit the steps in flight before scheduling another

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished or a step in flight."""
        return bool(self.requests) or self.num_in_flight > 0

    def schedule(self) -> Scheduled | None:
        """Return the next step. None: there are no requests, all wait for adapters, or a step in flight must be
        committed first."""
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
            has_room = has_room and self.num_preemptions == preemptions_before  # a preemption means that blocks ran out

        while len(self.waiting) and budget.prompts > 0 and (has_room or not (shares or self.num_in_flight)):
            if self._admit(budget, shares, admitted, len(self.running)):
                continue
            if shares or not self.running or self.num_in_flight or self._first_waiting() is None:
                break
            preempt_last(self)  # running beams wait for a beam that waits for their blocks

        if not shares:
            assert self.num_in_flight or not self.requests or self._is_loading, "requests exist, but no step can run"
            return None
        return self._scheduled(shares, admitted, budget.tokens)

    def commit(self, scheduled: Scheduled, result: StepResult, seconds: float = 0.0) -> list[TokenDelta]:
        """Apply the result of the oldest step in flight: mark its tokens as computed, and append sampled tokens.

        Args:
            seconds: duration of the step; with several in flight, the time since the previous result; 0: not measured.

        Returns:
            New tokens and ends of sequences. Ended sequences have been removed and their blocks freed.
        """
        self.num_in_flight -= 1
        self._cost.observe(scheduled.work, seconds)
        return commit(self, scheduled, result)

    def discard_in_flight(self) -> None:
        """Discard the steps in flight after an exception. The runner's rows are not valid any more, so all running
        sequences are requeued."""
        self.num_in_flight = 0
        self.kv.prefix_cache.forget_pending()
        for sequence in list(self.running):
            self.requeue(sequence)
        self.kv.pop_copies()
        self.kv.pop_table_changes()
        if self.adapters is not None:
            self.adapters.discard_slots()

    def _scheduled(self, shares: dict[Sequence, int], admitted: list[Request], tokens_left: int) -> Scheduled:
        """Build the step that computes `shares` (tokens by sequence), and count it as in flight."""
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
                # A parent that is a step ahead cannot share its state with forks.
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
        """Propose drafts for sequences that decode, within the limits of the budget, the blocks and the request."""
        assert self._proposer is not None
        drafts: dict[Sequence, list[int]] = {}
        if self.kv.has_states:  # rejected tokens cannot be removed from a state
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
        """Whether a waiting sequence that could run precedes this prompt in queue order."""
        waiting = self._first_waiting()
        return waiting is not None and waiting.sort_key < sequence.sort_key

    def _first_waiting(self) -> Sequence | None:
        """Return the first waiting sequence that does not wait for an adapter, or None."""
        if self.adapters is not None:
            return self.adapters.first_waiting()
        return self.waiting.first() if len(self.waiting) else None

    @property
    def _is_loading(self) -> bool:
        return self.adapters is not None and self.adapters.is_loading

    def _admit(
        self, budget: StepBudget, shares: dict[Sequence, int], admitted: list[Request], batch_index: int
    ) -> bool:
        """Admit the first waiting sequence that does not wait for an adapter, at `batch_index` of the running ones.
        False: there is none, or no row, blocks or budget for it."""
        sequence = self._first_waiting()  # called even without a free row: it starts the loads that sequences wait for
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
