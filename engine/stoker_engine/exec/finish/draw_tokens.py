"""Draws the next tokens of sequences from their hidden states, on ranks that may split the vocabulary.

With several ranks, all choose the most likely tokens, which are equal on all. Only the first rank draws the others, and
broadcasts them on the device, so no rank's host waits:

    rank 0   logits ─┬─► most likely token ─────────────────────────────────────┬─► tokens of all rows
    rank 1   logits ─┤   of each row                                            │   on all ranks
                     └─► whole logits of ─► rank 0 draws ─► broadcast ─────────►┘
                         rows that ask for more

In a pipeline, the ranks of the last stage need no tokens: the scheduler sends them to the first stage. So rank 0 keeps
the drawn ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from stoker_engine.core.step import Sampled, Step
from stoker_engine.exec.finish.logits import Logits
from stoker_engine.exec.finish.sampling_graphs import SamplingGraph, SamplingGraphs
from stoker_engine.exec.finish.verify_draft import verify_draft
from stoker_engine.exec.input_batch import InputBatch
from stoker_engine.exec.step_masks import MasksByBatchIndex
from stoker_engine.grammar.masks import FREE
from stoker_engine.kernels.select_token import UNIFORM
from stoker_engine.parallel.transfer import to_device
from stoker_engine.sampling.draw import uniforms
from stoker_engine.sampling.sampler import (
    Samples,
    already_chosen,
    draw_or_choose,
    joined,
    replaced,
    sample,
    samples_of,
)
from stoker_engine.sampling.sampling_metadata import SamplingMetadata


class _Kinds(NamedTuple):
    """How the next tokens of sequences are chosen: the most likely one, unless the sequence is in one of the masks.

    Attributes:
        rows: int64 [sequences], their rows in the input batch.
        are_drawn, are_special: bool [sequences], see `InputBatch`.
    """

    rows: np.ndarray
    are_drawn: np.ndarray
    are_special: np.ndarray

    @property
    def ask(self) -> np.ndarray:
        """bool [sequences], those in one of the masks."""
        ask: np.ndarray = self.are_drawn | self.are_special
        return ask

    def at(self, indices: np.ndarray) -> _Kinds:
        """Return the kinds of the sequences at `indices`."""
        return _Kinds(*(each[indices] for each in self))


@dataclass(frozen=True, eq=False)
class TokenDraws:
    """Draws tokens.

    Attributes:
        rows_at_once: maximum number of rows of logits that the sampler processes at once.
        logits_at_once: maximum number of rows of logits computed at once if each sequence needs only its most likely
            token.
        samples: whether this rank draws tokens and returns complete results; other ranks compute the most likely
            tokens.
        shares_drawn: whether other ranks receive the drawn tokens. In a pipeline the scheduler sends them instead.
        graphs: graphs of plain sampling; None: tokens are sampled kernel by kernel.
    """

    batch: InputBatch
    logits: Logits
    rows_at_once: int
    logits_at_once: int
    samples: bool
    shares_drawn: bool
    graphs: SamplingGraphs | None = None

    def start(
        self,
        step: Step,
        batch_indices: list[int],
        hidden: torch.Tensor,
        tokens: torch.Tensor,
        masks: Future[MasksByBatchIndex] | None,
        on_logits: Callable[[], None] = lambda: None,
    ) -> Samples:
        """Start to draw the tokens of some of a step's sequences, and to verify their drafts.

        Args:
            batch_indices: the sequences.
            hidden: [rows, hidden], hidden states of the last known token and the draft of each sequence.
            tokens: int64 [rows], index in the step of each row's token.
            on_logits: called once the first logits are computed or, on a GPU, are being computed.

        Returns:
            First tokens of each row of `hidden`, the same on all ranks that need them; and results, one per sequence,
            which are complete only on the sampling rank.
        """
        kinds = self._kinds(step, batch_indices)
        if (graph := self._graph(len(hidden), step, kinds)) is not None:
            samples = graph.run(hidden, None if kinds is None else self._draws(step, batch_indices, kinds))
            on_logits()
            return samples
        if kinds is None:
            return self._choose(hidden, tokens, on_logits)
        logits = self.logits.of(hidden, tokens)
        on_logits()
        found = masks.result() if masks is not None else {}
        if step.drafts:
            samples = self._draw_drafted(logits, step, batch_indices, found)
            return Samples(samples.tokens, partial(_verified, step, batch_indices, found, samples))
        if self.logits.ranks.size == 1:
            return self._draw(logits, step, batch_indices, kinds, found)
        asking = np.flatnonzero(kinds.ask)
        of_asking = [batch_indices[index] for index in asking]
        return self._draw_on_first_rank(
            logits, asking, lambda whole: self._draw(whole, step, of_asking, kinds.at(asking), found)
        )

    def _graph(self, num_rows: int, step: Step, kinds: _Kinds | None) -> SamplingGraph | None:
        """Return the graph that samples so many rows; None: they are sampled kernel by kernel."""
        if self.graphs is None or step.drafts or self.logits.rows.has_adapters:
            return None
        if kinds is None:
            return self.graphs.find(num_rows, draws=False)
        return None if kinds.are_special.any() else self.graphs.find(num_rows, draws=True)

    def _kinds(self, step: Step, batch_indices: list[int]) -> _Kinds | None:
        """Return how the next tokens are chosen; None: each is the most likely one, and no draft is verified."""
        if not step.drafts and max(step.num_samples) == 1 and self.batch.asking.isdisjoint(step.rows):
            return None  # the common case, without arrays
        rows = np.array([step.rows[batch_index] for batch_index in batch_indices], dtype=np.int64)
        are_special = self.batch.is_special[rows]
        if max(step.num_samples) > 1:
            are_special |= np.array(step.num_samples)[batch_indices] > 1
        kinds = _Kinds(rows, self.batch.is_drawn[rows] & ~are_special, are_special)
        return kinds if step.drafts or kinds.ask.any() else None

    def _draws(self, step: Step, batch_indices: list[int], kinds: _Kinds) -> tuple[np.ndarray, np.ndarray]:
        """Return the indices of the sequences in `_Kinds.are_drawn`, int64 [drawn], and how they draw, float64
        [drawn, parameters]; see `kernels.select_token`."""
        drawn = np.flatnonzero(kinds.are_drawn)
        rows, of_drawn = kinds.rows[drawn], [batch_indices[index] for index in drawn]
        parameters = self.batch.selections[rows]
        positions = np.array([step.starts[index] + step.lengths[index] for index in of_drawn], dtype=np.int64)
        parameters[:, UNIFORM] = uniforms(self.batch.streams[rows], positions)
        return drawn, parameters

    def _draw(
        self, logits: torch.Tensor, step: Step, batch_indices: list[int], kinds: _Kinds, masks: MasksByBatchIndex
    ) -> Samples:
        """Draw the tokens of sequences without drafts, one for each row of whole logits."""
        if kinds.are_special.all():
            samples = sample(logits, self._choices(step, batch_indices, masks), self.rows_at_once, self.logits.kernels)
            return Samples(samples.tokens, partial(_verified, step, batch_indices, masks, samples))
        draws = self._draws(step, batch_indices, kinds)
        plain = draw_or_choose(logits, *draws, self.rows_at_once, self.logits.kernels)
        if not kinds.are_special.any():
            return plain
        row_indices = np.flatnonzero(kinds.are_special)
        return replaced(plain, row_indices, self._draw_special(logits, step, batch_indices, row_indices, masks))

    def _draw_special(
        self,
        logits: torch.Tensor,
        step: Step,
        batch_indices: list[int],
        row_indices: np.ndarray,
        masks: MasksByBatchIndex,
    ) -> Samples:
        """Draw the tokens of sequences without drafts that need `SamplingMetadata`, in copies of some rows of logits.

        Args:
            row_indices: int64 [count], rows of logits, which are also indices of `batch_indices`.
        """
        parts = list[Samples]()
        for first in range(0, len(row_indices), self.rows_at_once):
            part = row_indices[first : first + self.rows_at_once]
            indices = [batch_indices[index] for index in part]
            rows = logits[to_device(part, logits.device)]
            samples = sample(rows, self._choices(step, indices, masks), self.rows_at_once, self.logits.kernels)
            parts.append(Samples(samples.tokens, partial(_verified, step, indices, masks, samples)))
        return joined(parts)

    def _choose(self, hidden: torch.Tensor, tokens: torch.Tensor, on_logits: Callable[[], None]) -> Samples:
        """Choose the most likely token of each row, see `start`."""
        parts = list[Samples]()
        for part, part_tokens in zip(hidden.split(self.logits_at_once), tokens.split(self.logits_at_once), strict=True):
            logits = self.logits.of(part, part_tokens)
            if not parts:
                on_logits()
            parts.append(samples_of(*self.logits.likeliest(logits)))
        return joined(parts)

    def _choices(self, step: Step, batch_indices: list[int], masks: MasksByBatchIndex) -> list[SamplingMetadata | None]:
        """Return how to choose in each row of logits."""
        drafts = {draft.batch_index: draft.token_ids for draft in step.drafts}
        choices: list[SamplingMetadata | None] = []
        for batch_index in batch_indices:
            row, draft = step.rows[batch_index], drafts.get(batch_index, [])
            position = step.starts[batch_index] + step.lengths[batch_index] - len(draft)
            choices += [
                self.batch.choice(row, position + held, step.num_samples[batch_index], draft[:held], mask)
                for held, mask in enumerate(masks.get(batch_index, [FREE] * (1 + len(draft))))
            ]
        return choices

    def _draw_drafted(
        self, logits: torch.Tensor, step: Step, batch_indices: list[int], masks: MasksByBatchIndex
    ) -> Samples:
        """Draw a token for each row of logits in a step with drafts. A sequence has a row for its next token, and one
        after each token of its draft."""
        choices, kernels = self._choices(step, batch_indices, masks), self.logits.kernels
        if self.logits.ranks.size == 1:
            return sample(logits, choices, self.rows_at_once, kernels)
        asking = [row for row, choice in enumerate(choices) if choice is not None]
        if not asking:
            return samples_of(*self.logits.likeliest(logits))
        of_asking = [choices[row] for row in asking]
        return self._draw_on_first_rank(
            logits, asking, lambda whole: sample(whole, of_asking, self.rows_at_once, kernels)
        )

    def _draw_on_first_rank(
        self, logits: torch.Tensor, asking: Sequence[int] | np.ndarray, draw: Callable[[torch.Tensor], Samples]
    ) -> Samples:
        """Have the first rank draw tokens in some rows, and send them to the other ranks if these need them. Choose the
        most likely token in the other rows.

        The errors of grammars are known to the first rank only. Other ranks may therefore keep a token of a request
        that fails, or tokens of a draft beyond the accepted ones, which the next step overwrites.

        Args:
            logits: this rank's part of the logits.
            asking: ascending indices of the rows in which tokens are drawn.
            draw: draws tokens from the whole logits of these rows.
        """
        ranks, device = self.logits.ranks, logits.device
        likeliest = samples_of(*self.logits.likeliest(logits))
        whole = self.logits.gather(logits if len(asking) == len(logits) else logits[to_device(asking, device)])
        if not self.shares_drawn:
            return replaced(likeliest, asking, draw(whole)) if self.samples else likeliest
        if self.samples:
            drawn = draw(whole)
            tokens = ranks.broadcast(drawn.tokens())
            return replaced(likeliest, asking, Samples(lambda: tokens, drawn.collect))
        tokens = ranks.broadcast(torch.empty(len(asking), dtype=torch.int64, device=device))
        return replaced(likeliest, asking, already_chosen(tokens))


def _verified(step: Step, batch_indices: list[int], masks: MasksByBatchIndex, samples: Samples) -> list[Sampled]:
    """Return the result of each sequence, from the results of its rows of logits."""
    drafts = {draft.batch_index: draft.token_ids for draft in step.drafts}
    drawn = iter(samples.collect())
    verified = []
    for batch_index in batch_indices:
        draft = drafts.get(batch_index, [])
        sequence_masks = masks.get(batch_index, [FREE] * (1 + len(draft)))
        errors = [mask.error for mask in sequence_masks]
        verified.append(verify_draft([next(drawn) for _ in sequence_masks], draft, errors))
    return verified
