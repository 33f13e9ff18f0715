"""Sampling: computes logits of the tokens that sample, draws next tokens, and verifies drafts."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch

from stoker_engine.core.step import Sampled, Step, StepResult
from stoker_engine.exec.finish.logits import Logits
from stoker_engine.exec.finish.prompt_logprobs import PromptLogprobs
from stoker_engine.exec.finish.verify_draft import verify_draft
from stoker_engine.exec.input_batch import InputBatch
from stoker_engine.exec.inputs import Inputs
from stoker_engine.exec.step_masks import MasksByBatchIndex, StepMasks
from stoker_engine.grammar.masks import FREE
from stoker_engine.parallel.transfer import to_device, to_host
from stoker_engine.quant.weight_target import Shard
from stoker_engine.sampling.sampler import greedy, sample
from stoker_engine.sampling.sampling_metadata import SamplingMetadata
from stoker_engine.sampling.vocab_parallel_argmax import vocab_parallel_argmax


@dataclass(frozen=True, eq=False)
class Sampling:
    """See `Finish`.

    Attributes:
        vocabulary: this rank's part of the vocabulary.
        rows_at_once: maximum number of rows of logits that the sampler processes at once.
        logits_at_once: maximum number of rows of logits computed at once if each sequence needs only its most likely
            token.
        samples: whether this rank returns the results; other ranks compute only logits and the most likely tokens.
        keeps_sampled: whether sampled tokens are written into the rows. In a pipeline the scheduler sends them instead.
    """

    batch: InputBatch
    masks: StepMasks
    logits: Logits
    prompt_logprobs: PromptLogprobs
    vocabulary: Shard
    rows_at_once: int
    logits_at_once: int
    samples: bool
    keeps_sampled: bool

    def begin(self, step: Step, inputs: Inputs) -> StepSampling:
        """See `Finish`. Starts the masks of grammars, which are computed concurrently with the model."""
        masks = self.masks.launch(step, self.batch) if self.samples else None
        needs_all = len(inputs.logit_rows) == len(inputs.token_rows) or self.prompt_logprobs.are_requested(step)
        return StepSampling(self, step, inputs, masks, None if needs_all else inputs.logit_rows)


class StepSampling:
    """See `StepFinish`."""

    def __init__(
        self,
        of: Sampling,
        step: Step,
        inputs: Inputs,
        masks: Future[MasksByBatchIndex] | None,
        kept: torch.Tensor | None,
    ) -> None:
        self._of, self._step, self._inputs, self._masks, self.kept = of, step, inputs, masks, kept
        self._drafts = {draft.batch_index: draft.token_ids for draft in step.drafts}

    def finish(self, hidden: torch.Tensor, states: Mapping[int, torch.Tensor]) -> StepResult:
        """See `StepFinish`."""
        computed = time.monotonic()
        of, step, inputs = self._of, self._step, self._inputs
        tokens = inputs.logit_rows
        rows = hidden if len(tokens) == len(hidden) else hidden[tokens]  # avoids a copy if all are needed
        is_plain = self._is_plain()
        parts: Iterable[tuple[torch.Tensor, torch.Tensor]] = [(rows, tokens)] if len(rows) else []
        if is_plain and len(rows) > of.logits_at_once:
            parts = zip(rows.split(of.logits_at_once), tokens.split(of.logits_at_once), strict=True)
        sampled: list[Sampled] = []
        for part, part_tokens in parts:
            logits = of.logits.of(part, part_tokens)
            computed = time.monotonic() if not sampled else computed
            masks = self._masks.result() if self._masks is not None else {}
            sampled += self._draw(logits, [None] * len(logits)) if is_plain else self._sample(logits, masks)
        if len(rows) and of.keeps_sampled:
            self._keep_sampled(sampled)
        requested = of.prompt_logprobs.are_requested(step)
        prompt_logprobs = of.prompt_logprobs.find(hidden, inputs, step) if requested else {}
        return StepResult(sampled, prompt_logprobs, sample_time=time.monotonic() - computed)

    def _is_plain(self) -> bool:
        """Whether sequences sample, without drafts, and each needs only its most likely token."""
        step, asking = self._step, self._of.batch.asking
        if step.drafts or max(step.num_samples, default=0) != 1:
            return False
        if asking.isdisjoint(step.rows):
            return True
        return not any(num and row in asking for row, num in zip(step.rows, step.num_samples, strict=True))

    def _sample(self, logits: torch.Tensor, masks: MasksByBatchIndex) -> list[Sampled]:
        """Draw the tokens of each sequence that samples, and verify drafts. Other ranks than the sampling one return
        the most likely tokens."""
        step = self._step
        choices: list[SamplingMetadata | None] = []
        shares = zip(step.rows, step.starts, step.lengths, step.num_samples, strict=True)
        for batch_index, (row, start, length, num_samples) in enumerate(shares):
            if num_samples:
                draft = self._drafts.get(batch_index, [])
                position = start + length - len(draft)
                sequence_masks = masks.get(batch_index, [FREE] * (1 + len(draft)))
                choices += [
                    self._of.batch.choice(row, position + held, num_samples, draft[:held], mask)
                    for held, mask in enumerate(sequence_masks)
                ]
        drawn = iter(self._draw(logits, choices))
        verified = []
        for batch_index in self._sampling_indices:
            draft = self._drafts.get(batch_index, [])
            sequence_masks = masks.get(batch_index, [FREE] * (1 + len(draft)))
            errors = [mask.error for mask in sequence_masks]
            verified.append(verify_draft([next(drawn) for _ in sequence_masks], draft, errors))
        return verified

    def _draw(self, logits: torch.Tensor, choices: list[SamplingMetadata | None]) -> list[Sampled]:
        """Draw tokens for each row, from this rank's part of the logits. The other parts are gathered only for rows
        that need more than the most likely token."""
        of, ranks, kernels = self._of, self._of.logits.ranks, self._of.logits.kernels
        if ranks.size == 1:
            return sample(logits, choices, of.rows_at_once, kernels)
        drawn = greedy(*vocab_parallel_argmax(logits, of.vocabulary.start, ranks, kernels.argmax))
        asking = [row for row, choice in enumerate(choices) if choice is not None]
        if asking:
            rows = logits if len(asking) == len(choices) else logits[to_device(asking, logits.device)]
            rows, row_choices = of.logits.gather(rows), [choices[row] for row in asking]
            if of.samples:
                for row, sampled in zip(asking, sample(rows, row_choices, of.rows_at_once, kernels), strict=True):
                    drawn[row] = sampled
        return drawn

    @property
    def _sampling_indices(self) -> list[int]:
        """Batch indices of the sequences that sample."""
        return [batch_index for batch_index, num_samples in enumerate(self._step.num_samples) if num_samples]

    def _keep_sampled(self, sampled: list[Sampled]) -> None:
        """Write the tokens of each sequence's first child, which is the sequence itself, into its row."""
        step, batch, sampling_indices = self._step, self._of.batch, self._sampling_indices
        tokens = [drawn.token_ids[0] if drawn.token_ids else [] for drawn in sampled]
        if self._of.logits.ranks.size > 1:
            tokens = self._from_first_rank(tokens, sampling_indices)
        if step.drafts:
            for batch_index, row_tokens in zip(sampling_indices, tokens, strict=True):
                end = step.starts[batch_index] + step.lengths[batch_index] - len(self._drafts.get(batch_index, []))
                batch.append(step.rows[batch_index], end, row_tokens)
            return
        first_tokens = [
            (batch_index, row_tokens[0])
            for batch_index, row_tokens in zip(sampling_indices, tokens, strict=True)
            if row_tokens
        ]
        rows = [step.rows[batch_index] for batch_index, _ in first_tokens]
        batch.append_one(
            rows, [step.starts[p] + step.lengths[p] for p, _ in first_tokens], [token for _, token in first_tokens]
        )

    def _from_first_rank(self, tokens: list[list[int]], batch_indices: Sequence[int]) -> list[list[int]]:
        """Return the tokens of the sequences at `batch_indices`, on all ranks. Tokens of sequences that need more than
        the most likely one are broadcast from the first rank."""
        step, batch = self._step, self._of.batch
        asking = [
            index
            for index, batch_index in enumerate(batch_indices)
            if step.num_samples[batch_index] > 1 or step.rows[batch_index] in batch.asking
        ]
        if not asking:
            return tokens
        longest = 1 + max((len(draft.token_ids) for draft in step.drafts), default=0)
        padded = np.full((len(asking), longest), -1, dtype=np.int64)
        for row, index in zip(padded, asking, strict=True):
            row[: len(tokens[index])] = tokens[index]
        device = self._inputs.logit_rows.device
        received = to_host(self._of.logits.ranks.broadcast(to_device(padded, device)))
        for index, row_tokens in zip(asking, received, strict=True):
            tokens[index] = [token for token in row_tokens if token >= 0]
        return tokens
