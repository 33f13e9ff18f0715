"""The end of a step, behind the model's forward pass: the seam between the runner and what becomes of hidden states.

    sample.py        logits of the tokens that sample, drawn; drafts verified; log-probabilities of prompts
    next_stage.py    to the next stage of the pipeline

A way to finish need neither sample nor compute logits: one that pools asks for the hidden states that it pools.
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
        """int64, ascending: the tokens whose hidden states it needs; None: all."""
        ...

    def finish(self, hidden: torch.Tensor, states: Mapping[int, torch.Tensor]) -> StepResult:
        """The step's result, but for the times of what came before.

        Args:
            hidden: [kept, hidden], or of all tokens; a step of a CUDA graph has all of them.
            states: see `models.model.StepInputs.hidden_states`.
        """
        ...


class Finish(Protocol):
    """A way to finish steps."""

    def begin(self, step: Step, inputs: Inputs) -> StepFinish:
        """Begins with a step whose changes the input batch has taken in, before the model runs. What can be done beside
        the model begins here."""
        ...
