"""Interface for the end of a step, after the model's forward pass.

    sample.py        computes logits, samples, verifies drafts, and computes log-probabilities of prompts
    next_stage.py    sends hidden states to the next stage of the pipeline

An implementation need not sample or compute logits: pooling uses the hidden states directly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from stoker_engine.core.step import Step, StepResult
from stoker_engine.exec.inputs import Inputs


class StepFinish(Protocol):
    """The finish of one step."""

    @property
    def kept(self) -> torch.Tensor | None:
        """int64, ascending indices of the tokens whose hidden states `finish` needs; None: all."""
        ...

    def finish(self, hidden: torch.Tensor, states: Mapping[int, torch.Tensor]) -> StepResult:
        """Return the step's result, without the times of earlier phases.

        Args:
            hidden: hidden states of the `kept` tokens, [kept, hidden], or of all tokens, [tokens, hidden]; a CUDA graph
                computes those of all tokens.
            states: see `models.model.StepInputs.hidden_states`.
        """
        ...


class Finish(Protocol):
    """A way to finish steps."""

    def begin(self, step: Step, inputs: Inputs) -> StepFinish:
        """Prepare the finish of a step whose changes the input batch already contains. Called before the model runs, so
        that work can run concurrently with the model."""
        ...
