"""The runner's state of the running sequences, one row each, kept from step to step: see `core.step`.

    row   tokens                        block tables, by group      sampling
     0    t0 t1 t2 t3 t4 …              4 9 2 7 0 0 …               greedy, without options
     1    t0 t1 t2 …                    5 1 0 …                     temperature 0.7, seed 5, …

Tokens and block tables are NumPy arrays, which each step updates in place. A step's inputs are built by a few array
operations, regardless of the rows' content. Memory that no sequence has needed yet is not touched.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

import numpy as np

from stoker_engine.core.logit_rules import LogitRules
from stoker_engine.core.step import KNOWN_ENTRY, TABLE_ENTRY, Fork, NewSequence, Step
from stoker_engine.core.token_counts import TokenCounts
from stoker_engine.exec.device_batch import ADAPTER, POSITION_DELTA, empty_values
from stoker_engine.grammar.masks import FREE, Mask
from stoker_engine.grammar.matcher import Matcher
from stoker_engine.kernels.select_token import COLUMNS
from stoker_engine.sampling.draw import selection, stream
from stoker_engine.sampling.sampling_metadata import SamplingMetadata
from stoker_engine.sizing.cache_groups import NULL_BLOCK, CacheGroup


@dataclass(slots=True)
class BatchRow:
    """State of a row besides tokens and blocks.

    Attributes:
        new: the message that started the row or, if the row was forked, the row from which it descends.
        index: index of the sequence in its request.
        rules: changes of the sequence's logits; None: none.
        counts: counts of its tokens; None: no penalty needs them.
        num_prompt_logprobs: number of prompt tokens whose log-probabilities are already computed.
        is_plain: whether its next token is the most likely one, without log-probabilities, rules or grammar.
        is_drawn: whether its next token is a single drawn one, without any of these, and the sequence is no beam.
        reads_tokens: whether the choice of its next token depends on previous ones: penalties, bad words, a grammar.
        matcher: state of its grammar; None: no grammar, or not used yet.
    """

    new: NewSequence
    index: int
    rules: LogitRules | None
    counts: TokenCounts | None
    num_prompt_logprobs: int
    is_plain: bool
    is_drawn: bool
    reads_tokens: bool
    matcher: Matcher | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt, in tokens."""
        return len(self.new.spec.prompt_token_ids)


class InputBatch:
    """The rows of the running sequences.

    Args:
        num_rows: maximum number of running sequences.
        num_tokens: maximum number of tokens per sequence, including drafts.
        block_size: tokens per block.
        groups: groups of layers; a sequence has a block table for each.

    Attributes:
        token_ids: int32 [rows, tokens].
        tables: int32 [groups, rows, blocks], `NULL_BLOCK` in empty entries.
        values: int64 [values, rows + 1], see `exec.device_batch`. The host sets adapters and position deltas.
        states: state of each row that has been started.
        asking: rows that need more than the most likely token, see `BatchRow.is_plain`.
        wants_prompt_logprobs: rows whose requests ask for prompt log-probabilities.
        constrained: rows whose requests have a grammar.
        reading_tokens: see `BatchRow.reads_tokens`.
        is_drawn: bool [rows], rows of `asking` that need one draw, see `BatchRow.is_drawn`.
        is_special: bool [rows], the other rows of `asking`.
        selections: float64 [rows, parameters], how the rows in `is_drawn` draw, see `sampling.draw.selection`.
        streams: uint64 [rows], streams of random numbers of the rows in `is_drawn`, see `sampling.draw.stream`.
        num_in_flight: int64 [rows], number of steps in flight that sample a token of the row, which `token_ids` does
            not contain yet.
    """

    def __init__(self, num_rows: int, num_tokens: int, block_size: int, groups: Sequence[CacheGroup]) -> None:
        self.token_ids = np.zeros((num_rows, num_tokens), dtype=np.int32)
        longest = max([-(-num_tokens // block_size), *(group.blocks_per_sequence for group in groups)])
        self.tables = np.zeros((len(groups), num_rows, longest), dtype=np.int32)  # the null block is 0
        self.values = empty_values(num_rows)
        self.states: dict[int, BatchRow] = {}
        self.asking: set[int] = set()
        self.wants_prompt_logprobs: set[int] = set()
        self.constrained: set[int] = set()
        self.reading_tokens: set[int] = set()
        self.is_special = np.zeros(num_rows, dtype=bool)
        self.is_drawn = np.zeros(num_rows, dtype=bool)
        self.selections = np.zeros((num_rows, len(COLUMNS)))
        self.streams = np.zeros(num_rows, dtype=np.uint64)
        self.num_in_flight = np.zeros(num_rows, dtype=np.int64)
        self._starts = np.zeros(num_rows, dtype=np.int64)  # how often each row has been started
        self._rules: WeakValueDictionary[tuple[str, float], LogitRules] = WeakValueDictionary()
        self._counted: set[int] = set()  # rows with token counts
        self._num_blocks = [0] * num_rows  # number of table entries that may be non-empty

    def clear(self) -> None:
        """Discard all sequences. A row's tables are cleared when the next sequence starts in it."""
        self.states.clear()
        self.discard_in_flight()
        for rows in (
            self.asking, self.wants_prompt_logprobs, self.constrained, self.reading_tokens, self._counted
        ):  # fmt: skip
            rows.clear()

    def apply(self, step: Step) -> None:
        """Apply a step's changes to the rows."""
        for fork in step.forks:
            self._fork(fork)
        for new in step.new:
            self._begin(new)
        for row, position, token_ids in step.written:
            self.append(row, position, token_ids)
        if step.known:
            rows, positions, tokens = np.array(step.known, dtype=np.int32).reshape(-1, KNOWN_ENTRY).T.tolist()
            self.append_one(rows, positions, tokens)
        if step.tables:
            row_of, group, index, block = self._entries(step)
            self.tables[group, row_of, index] = block
            for row, last in zip(row_of.tolist(), index.tolist(), strict=True):
                self._num_blocks[row] = max(self._num_blocks[row], last + 1)

    def begin_sampling(self, rows: np.ndarray) -> np.ndarray:
        """Count a step in flight that samples a token of each of the rows, int64 [count]. Returns what `end_sampling`
        needs."""
        self.num_in_flight[rows] += 1
        starts: np.ndarray = self._starts[rows]
        return starts

    def end_sampling(self, rows: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """End what `begin_sampling` began. Returns bool [count]: whether the row still belongs to the sequence whose
        token was sampled."""
        is_current: np.ndarray = self._starts[rows] == starts
        self.num_in_flight[rows[is_current]] -= 1
        return is_current

    def discard_in_flight(self) -> None:
        """Forget the steps in flight, whose results will not be collected."""
        self.num_in_flight[:] = 0

    def append(self, row: int, position: int, token_ids: list[int]) -> None:
        """Write tokens of the output from `position` on, and count them if penalties need counts."""
        self.token_ids[row, position : position + len(token_ids)] = token_ids
        counts = self.states[row].counts
        if counts is not None:
            for token_id in token_ids:
                counts.add(token_id)

    def append_one(self, rows: list[int], positions: list[int], token_ids: list[int]) -> None:
        """Write one token into each of the rows; see `append`."""
        self.token_ids[rows, positions] = token_ids
        if self._counted:
            for row, token_id in zip(rows, token_ids, strict=True):
                if (counts := self.states[row].counts) is not None:
                    counts.add(token_id)

    def choice(
        self, row: int, position: int, num_samples: int, drafted: list[int], mask: Mask = FREE
    ) -> SamplingMetadata | None:
        """Return how the token at `position` is chosen; None: it is the most likely one.

        Args:
            drafted: preceding draft tokens, which are not counted in the row.
            mask: tokens that the row's grammar allows.
        """
        if row not in self.asking and num_samples == 1:
            return None
        state = self.states[row]
        spec, prompt = state.new.spec, state.num_prompt_tokens
        counts = state.counts
        if counts is not None and drafted:
            counts = counts.copy()
            for token_id in drafted:
                counts.add(token_id)
        return SamplingMetadata(
            params=spec.params,
            seed=spec.seed + state.index,
            known=self.token_ids[row, :position],  # type: ignore[arg-type]
            num_prompt_tokens=prompt,
            num_samples=num_samples,
            rules=state.rules,
            counts=counts,
            may_end=position - prompt >= spec.params.min_tokens,
            num_candidates=state.new.num_candidates,
            allowed=mask.allowed,
        )

    def prompt_positions(self, row: int, start: int, end: int) -> range:
        """Return the positions from `start` to before `end` whose logits give prompt log-probabilities that are still
        needed."""
        state = self.states[row]
        params = state.new.spec.params
        if params.prompt_logprobs is None:
            return range(0)
        return range(max(start, state.num_prompt_logprobs), min(end, state.num_prompt_tokens - 1))

    def has_adapters(self, step: Step) -> bool:
        """Whether a row of the step uses an adapter."""
        return bool((self.values[ADAPTER, np.array(step.rows)] >= 0).any())

    def _begin(self, new: NewSequence) -> None:
        spec, row = new.spec, new.row
        prompt, output = spec.prompt_token_ids, new.output_token_ids
        self.token_ids[row, : len(prompt)] = prompt
        self.token_ids[row, len(prompt) : len(prompt) + len(output)] = output
        self.values[ADAPTER, row], self.values[POSITION_DELTA, row] = new.adapter_slot, 0
        self._clear(row, max(map(len, new.blocks), default=0))
        for group, table in enumerate(new.blocks):
            self.tables[group, row, : len(table)] = table
        rules = self._rules_of(new)
        params = spec.params
        is_simple = params.logprobs is None and rules is None and spec.grammar is None
        is_plain = params.is_greedy and is_simple
        is_drawn = not params.is_greedy and is_simple and not new.num_candidates
        reads_tokens = spec.grammar is not None or (rules is not None and rules.reads_tokens)
        counts = _counts(rules, prompt, output)
        self._remember(
            row, BatchRow(new, new.index, rules, counts, new.num_prompt_logprobs, is_plain, is_drawn, reads_tokens)
        )

    def _fork(self, fork: Fork) -> None:
        row, parent = fork.row, fork.parent
        self.token_ids[row, : fork.num_tokens] = self.token_ids[parent, : fork.num_tokens]
        self.values[:, row] = self.values[:, parent]
        self._clear(row, max(fork.num_blocks, default=0))
        for table, num_blocks in zip(self.tables, fork.num_blocks, strict=True):
            table[row, :num_blocks] = table[parent, :num_blocks]
        state = copy.copy(self.states[parent])
        state.index = fork.index
        state.matcher = None  # the parent continues with its own
        if state.rules is not None:  # the parent's counts may include later tokens
            prompt = state.new.spec.prompt_token_ids
            state.counts = _counts(state.rules, prompt, self.token_ids[row, len(prompt) : fork.num_tokens].tolist())
        self._remember(row, state)

    def _remember(self, row: int, state: BatchRow) -> None:
        self.states[row] = state
        self._starts[row] += 1
        self.num_in_flight[row] = 0
        self.reading_tokens.discard(row)
        if state.reads_tokens:
            self.reading_tokens.add(row)
        self.asking.discard(row)
        spec, params = state.new.spec, state.new.spec.params
        self.is_drawn[row] = state.is_drawn
        if state.is_drawn:
            self.selections[row] = selection(params.temperature, params.top_k, params.top_p, params.min_p)
            self.streams[row] = stream(spec.seed + state.index)
        self.is_special[row] = not (state.is_plain or state.is_drawn)
        if not state.is_plain:
            self.asking.add(row)
        self.wants_prompt_logprobs.discard(row)
        if params.prompt_logprobs is not None:
            self.wants_prompt_logprobs.add(row)
        self.constrained.discard(row)
        if state.new.spec.grammar is not None:
            self.constrained.add(row)
        self._counted.discard(row)
        if state.counts is not None:
            self._counted.add(row)

    def _clear(self, row: int, num_blocks: int) -> None:
        """Clear the tables of a row before it gets `num_blocks` blocks."""
        self.tables[:, row, : self._num_blocks[row]] = NULL_BLOCK
        self._num_blocks[row] = num_blocks

    def _rules_of(self, new: NewSequence) -> LogitRules | None:
        """Return the rules of a request, shared by all its sequences in the batch."""
        request = new.spec.id, new.spec.arrival_time  # an id may be reused after its request has ended
        rules = self._rules.get(request)
        if rules is None and (rules := LogitRules.of(new.spec)) is not None:
            self._rules[request] = rules
        return rules

    def _entries(self, step: Step) -> tuple[np.ndarray, ...]:
        group, row, index, block = np.array(step.tables, dtype=np.int32).reshape(-1, TABLE_ENTRY).T
        return row, group, index, block


def _counts(rules: LogitRules | None, prompt: list[int], output: list[int]) -> TokenCounts | None:
    counts = None if rules is None else rules.counts(prompt)
    if counts is not None:
        for token_id in output:
            counts.add(token_id)
    return counts
