"""Interface for the end of a step, after the model's forward pass.

    sample.py        computes logits, samples, verifies drafts, and computes log-probabilities of prompts
    next_stage.py    sends hidden states to the next stage of the pipeline

An implementation need not sample or compute logits: pooling uses the hidden states directly.

The host does not wait for the device until it collects a result, so it can start the next step before:

    step N      begin   finish ──────────────────► collect
    step N + 1                 begin   finish ───────────── before_resume ── resume ──► collect
    step N + 2                                                               begin   finish …

What the device cannot compute without the host having read N's tokens, such as the mask of a grammar, waits in N + 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from stoker_engine.core.step import Step, StepResult
from stoker_engine.exec.inputs import Inputs


class PendingResult(Protocol):
    """A result that the device may still compute."""

    def before_resume(self) -> None:
        """Start the host's part of `resume` in another thread. Called when the tokens of the previous step are in the
        rows, which must not be changed until `resume` returns."""
        ...

    def resume(self) -> None:
        """Start what had to wait for the tokens of the previous step. Called before the next step is launched and
        before `collect`; only the first call has an effect."""
        ...

    def collect(self) -> StepResult:
        """Wait for the device. Returns the step's result without the times of earlier phases, and writes sampled tokens
        into the rows."""
        ...


@dataclass(frozen=True)
class Complete:
    """A `PendingResult` that is already complete."""

    result: StepResult

    def before_resume(self) -> None:
        """See `PendingResult`."""

    def resume(self) -> None:
        """See `PendingResult`."""

    def collect(self) -> StepResult:
        """See `PendingResult`."""
        return self.result


class StepFinish(Protocol):
    """The finish of one step."""

    @property
    def kept(self) -> torch.Tensor | None:
        """int64, ascending indices of the tokens whose hidden states `finish` needs; None: all."""
        ...

    def finish(self, hidden: torch.Tensor, states: Mapping[int, torch.Tensor]) -> PendingResult:
        """Start to compute the step's result.

        Args:
            hidden: hidden states of the `kept` tokens, [kept, hidden], or of all tokens, [tokens, hidden]; a CUDA graph
                computes those of all tokens. Valid until the next step.
            states: see `models.model.StepInputs.hidden_states`.
        """
        ...


class Finish(Protocol):
    """A way to finish steps."""

    def begin(self, step: Step, inputs: Inputs) -> StepFinish:
        """Prepare the finish of a step whose changes the input batch already contains. Called before the model runs, so
        that work can run concurrently with the model."""
        ...
