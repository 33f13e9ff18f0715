"""Log-probabilities of prompt tokens, of requests that ask for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stoker_engine.core.logprobs import TokenLogprobs
from stoker_engine.core.step import Step
from stoker_engine.exec.finish.logits import Logits
from stoker_engine.exec.input_batch import InputBatch
from stoker_engine.exec.inputs import Inputs
from stoker_engine.parallel.transfer import to_host
from stoker_engine.sampling.logprobs import token_logprobs


@dataclass(frozen=True, eq=False)
class PromptLogprobs:
    """Computes log-probabilities of prompts, a few rows of logits at a time to bound memory.

    Attributes:
        rows_at_once: maximum number of rows of logits.
        samples: whether this rank returns the results.
    """

    batch: InputBatch
    logits: Logits
    rows_at_once: int
    samples: bool

    def are_requested(self, step: Step) -> bool:
        """Whether a request of the step asks for prompt log-probabilities."""
        return not self.batch.wants_prompt_logprobs.isdisjoint(step.rows)

    def find(self, hidden: torch.Tensor, inputs: Inputs, step: Step) -> dict[int, list[TokenLogprobs] | None]:
        """Return `StepResult.prompt_logprobs`, and count them in the rows. Lists are empty on ranks other than the
        sampling one.

        Args:
            hidden: hidden states of all the step's tokens.
        """
        found: dict[int, list[TokenLogprobs] | None] = {}
        for batch_index, (row, start, length) in enumerate(zip(step.rows, step.starts, step.lengths, strict=True)):
            positions = self.batch.prompt_positions(row, start, start + length)
            if positions:
                first = int(inputs.ends[batch_index]) - length - start
                found[batch_index] = self._find(hidden, first, row, positions)
                self.batch.states[row].num_prompt_logprobs = positions.stop
        return found

    def _find(self, hidden: torch.Tensor, first: int, row: int, positions: range) -> list[TokenLogprobs] | None:
        """Log-probabilities of the prompt tokens after `positions`; position p is token `first` + p of the step. None
        if logits are NaN or infinite."""
        params = self.batch.states[row].new.spec.params
        assert params.prompt_logprobs is not None
        found: list[TokenLogprobs] = []
        is_finite = True
        for start in range(positions.start, positions.stop, self.rows_at_once):
            stop = min(start + self.rows_at_once, positions.stop)
            tokens = torch.arange(first + start, first + stop, device=hidden.device)
            logits = self.logits.whole(hidden[first + start : first + stop], tokens)
            is_finite = is_finite and bool(to_host(self.logits.kernels.argmax(logits)[1].isfinite().all()))
            if is_finite and self.samples:
                following = self.batch.token_ids[row, start + 1 : stop + 1].tolist()
                counts = [params.prompt_logprobs] * len(following)
                found += token_logprobs(logits, following, counts, self.logits.kernels.logprobs)
        return found if is_finite else None
