"""Sampling: computes logits of the tokens that sample, draws next tokens, and verifies drafts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch

from stoker_engine.core.logprobs import TokenLogprobs
from stoker_engine.core.step import Sampled, Step, StepResult
from stoker_engine.exec.device_batch import DeviceBatch
from stoker_engine.exec.finish.draw_tokens import TokenDraws
from stoker_engine.exec.finish.prompt_logprobs import PromptLogprobs
from stoker_engine.exec.input_batch import InputBatch
from stoker_engine.exec.inputs import Inputs
from stoker_engine.exec.step_masks import MasksByBatchIndex, StepMasks
from stoker_engine.parallel.transfer import to_device


@dataclass(frozen=True, eq=False)
class Sampling:
    """See `Finish`.

    Attributes:
        keeps_sampled: whether sampled tokens are written into the rows. In a pipeline the scheduler sends them instead.
        device_batch: where sampled tokens are also written on the device, so that the next step can be launched before
            this one is collected; None: it cannot.
    """

    batch: InputBatch
    masks: StepMasks
    draws: TokenDraws
    prompt_logprobs: PromptLogprobs
    keeps_sampled: bool
    device_batch: DeviceBatch | None = None

    def begin(self, step: Step, inputs: Inputs) -> StepSampling:
        """See `Finish`. Starts the masks of grammars, which are computed concurrently with the model."""
        return StepSampling(self, step, inputs)


class StepSampling:
    """See `StepFinish` and `PendingResult`.

    A sequence is *late* if its next token depends on tokens of a step in flight, which the host does not know yet. It
    is sampled by `resume`, and delays no other sequence.
    """

    def __init__(self, of: Sampling, step: Step, inputs: Inputs) -> None:
        self._of, self._step, self._inputs = of, step, inputs
        self._drafts = {draft.batch_index: draft.token_ids for draft in step.drafts}
        self._sampling = [batch_index for batch_index, num_samples in enumerate(step.num_samples) if num_samples]
        self._late = self._find_late()
        self._early = [each for each in self._sampling if each not in self._late] if self._late else self._sampling
        self._masks = self._launch_masks(self._early)
        needs_all = len(inputs.logit_rows) == len(inputs.token_rows) or of.prompt_logprobs.are_requested(step)
        self.kept = None if needs_all else inputs.logit_rows
        self._late_rows: tuple[torch.Tensor, torch.Tensor] | None = None  # hidden states, indices of tokens
        self._drawn = list[tuple[list[int], Callable[[], list[Sampled]]]]()  # batch indices, their results
        self._prompt_logprobs: Callable[[], dict[int, list[TokenLogprobs] | None]] = dict
        self._computed = self._sample_time = 0.0  # monotonic time at which the first logits were computed; seconds

    def finish(self, hidden: torch.Tensor, states: Mapping[int, torch.Tensor]) -> StepSampling:
        """See `StepFinish`."""
        self._computed = time.monotonic()
        of, step, tokens = self._of, self._step, self._inputs.logit_rows
        rows = hidden if len(tokens) == len(hidden) else hidden[tokens]  # avoids a copy if all are needed
        if self._late:
            late, early = (to_device(self._logit_rows_of(each), rows.device) for each in (self._late, self._early))
            self._late_rows = rows[late], tokens[late]
            rows, tokens = rows[early], tokens[early]
        if self._early:
            self._draw(self._early, rows, tokens, self._masks)
        if of.keeps_sampled and self._sampling:
            self._rows = np.array([step.rows[batch_index] for batch_index in self._sampling], dtype=np.int64)
            self._starts = of.batch.begin_sampling(self._rows)
        if of.prompt_logprobs.are_requested(step):
            self._prompt_logprobs = of.prompt_logprobs.start(hidden, self._inputs, step)
        self._sample_time = time.monotonic() - self._computed
        return self

    def before_resume(self) -> None:
        """See `PendingResult`."""
        self._masks = self._launch_masks(self._late)

    def resume(self) -> None:
        """See `PendingResult`."""
        if self._late_rows is not None:
            self._draw(self._late, *self._late_rows, self._masks)
            self._late_rows = None

    def collect(self) -> StepResult:
        """See `PendingResult`."""
        sampled = [drawn for _, collect in self._drawn for drawn in collect()]
        collected = time.monotonic()
        if self._late:
            order = [batch_index for batch_indices, _ in self._drawn for batch_index in batch_indices]
            sampled = [sampled[index] for index in np.argsort(order)]
        if self._of.keeps_sampled and self._sampling:
            self._keep_sampled(sampled)
        prompt_logprobs = self._prompt_logprobs()
        return StepResult(sampled, prompt_logprobs, sample_time=self._sample_time + time.monotonic() - collected)

    def _find_late(self) -> list[int]:
        """Return the batch indices of late sequences."""
        step, batch = self._step, self._of.batch
        if batch.reading_tokens.isdisjoint(step.rows):
            return []
        in_flight = batch.num_in_flight
        return [each for each in self._sampling if (row := step.rows[each]) in batch.reading_tokens and in_flight[row]]

    def _logit_rows_of(self, batch_indices: list[int]) -> np.ndarray:
        """Return the indices in `Inputs.logit_rows` of the last known tokens and drafts of some sequences."""
        counts = np.array([1 + len(self._drafts.get(batch_index, [])) for batch_index in self._sampling])
        return np.flatnonzero(np.repeat(np.isin(self._sampling, batch_indices), counts))

    def _launch_masks(self, batch_indices: list[int]) -> Future[MasksByBatchIndex] | None:
        """Start to compute the masks of those sequences that have a grammar."""
        of = self._of
        return of.masks.launch(self._step, of.batch, batch_indices) if of.draws.samples else None

    def _draw(
        self,
        batch_indices: list[int],
        hidden: torch.Tensor,
        tokens: torch.Tensor,
        masks: Future[MasksByBatchIndex] | None,
    ) -> None:
        """Start to draw the tokens of some sequences; see `TokenDraws.start`."""

        def on_logits() -> None:
            self._computed = time.monotonic()

        samples = self._of.draws.start(self._step, batch_indices, hidden, tokens, masks, on_logits)
        if self._of.device_batch is not None:
            self._of.device_batch.sampled(self._inputs.token_rows[tokens], samples.tokens())
        self._drawn.append((batch_indices, samples.collect))

    def _keep_sampled(self, sampled: list[Sampled]) -> None:
        """Write the tokens of each sequence's first child, which is the sequence itself, into its row, unless the row
        has been given to another sequence."""
        step, batch, sampling = self._step, self._of.batch, self._sampling
        is_current = batch.end_sampling(self._rows, self._starts)
        tokens = [drawn.token_ids[0] if drawn.token_ids else [] for drawn in sampled]
        if not is_current.all():
            tokens = [row_tokens if holds else [] for row_tokens, holds in zip(tokens, is_current, strict=True)]
        if step.drafts:
            for batch_index, row_tokens in zip(sampling, tokens, strict=True):
                if row_tokens:
                    end = step.starts[batch_index] + step.lengths[batch_index] - len(self._drafts.get(batch_index, []))
                    batch.append(step.rows[batch_index], end, row_tokens)
            return
        first_tokens = [
            (batch_index, row_tokens[0]) for batch_index, row_tokens in zip(sampling, tokens, strict=True) if row_tokens
        ]
        rows = [step.rows[batch_index] for batch_index, _ in first_tokens]
        batch.append_one(
            rows, [step.starts[p] + step.lengths[p] for p, _ in first_tokens], [token for _, token in first_tokens]
        )
