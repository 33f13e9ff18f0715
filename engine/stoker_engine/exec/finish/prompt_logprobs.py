"""Log-probabilities of prompt tokens, of requests that ask for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from stoker_engine.core.logprobs import TokenLogprobs
from stoker_engine.core.step import Step
from stoker_engine.exec.finish.logits import Logits
from stoker_engine.exec.input_batch import InputBatch
from stoker_engine.exec.inputs import Inputs
from stoker_engine.parallel.transfer import HostCopy, to_device
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

    def start(
        self, hidden: torch.Tensor, inputs: Inputs, step: Step
    ) -> Callable[[], dict[int, list[TokenLogprobs] | None]]:
        """Start to compute log-probabilities, and count them in the rows.

        Args:
            hidden: hidden states of all the step's tokens.

        Returns:
            A function that waits for the device and returns `StepResult.prompt_logprobs`. Lists are empty on ranks
            other than the sampling one.
        """
        started = dict[int, Callable[[], list[TokenLogprobs] | None]]()
        for batch_index, (row, start, length) in enumerate(zip(step.rows, step.starts, step.lengths, strict=True)):
            positions = self.batch.prompt_positions(row, start, start + length)
            if positions:
                first = int(inputs.ends[batch_index]) - length - start
                started[batch_index] = self._start(hidden, first, row, positions)
                self.batch.states[row].num_prompt_logprobs = positions.stop
        return lambda: {batch_index: collect() for batch_index, collect in started.items()}

    def _start(
        self, hidden: torch.Tensor, first: int, row: int, positions: range
    ) -> Callable[[], list[TokenLogprobs] | None]:
        """Start to compute log-probabilities of the prompt tokens after `positions`; position p is token `first` + p of
        the step. The returned function returns None if logits are NaN or infinite."""
        params = self.batch.states[row].new.spec.params
        assert params.prompt_logprobs is not None
        are_finite = list[HostCopy]()
        parts = list[Callable[[], list[TokenLogprobs]]]()
        for start in range(positions.start, positions.stop, self.rows_at_once):
            stop = min(start + self.rows_at_once, positions.stop)
            tokens = torch.arange(first + start, first + stop, device=hidden.device)
            logits = self.logits.whole(hidden[first + start : first + stop], tokens)
            are_finite.append(HostCopy(self.logits.kernels.argmax(logits)[1].isfinite().all()))
            if self.samples:
                following = self.batch.token_ids[row, start + 1 : stop + 1].astype("int64")
                counts = [params.prompt_logprobs] * len(following)
                following_tokens = to_device(following, logits.device)
                parts.append(token_logprobs(logits, following_tokens, counts, self.logits.kernels.logprobs))

        def collect() -> list[TokenLogprobs] | None:
            if not all(is_finite.values() for is_finite in are_finite):
                return None
            return [logprobs for part in parts for logprobs in part()]

        return collect
