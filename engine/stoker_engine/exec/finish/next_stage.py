"""Sends hidden states to the next stage of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from stoker_engine.core.step import Step, StepResult
from stoker_engine.exec.finish.finish import Complete
from stoker_engine.exec.inputs import Inputs
from stoker_engine.parallel.rank_groups import Pipeline


@dataclass(frozen=True)
class SendToNextStage:
    """See `Finish` and `StepFinish`. One object is used for all steps."""

    pipeline: Pipeline

    @property
    def kept(self) -> None:
        """See `StepFinish`: None, because the next stage needs the hidden states of all tokens."""

    def begin(self, step: Step, inputs: Inputs) -> SendToNextStage:
        """See `Finish`."""
        return self

    def finish(self, hidden: torch.Tensor, states: Mapping[int, torch.Tensor]) -> Complete:
        """See `StepFinish`: nothing is sampled here."""
        self.pipeline.send(hidden)
        return Complete(StepResult([]))
