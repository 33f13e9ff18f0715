"""The scheduler's record of a step in flight."""

from __future__ import annotations

from dataclasses import dataclass

from stoker_engine.core.request import Request, Sequence
from stoker_engine.core.step import Step
from stoker_engine.sched.step_cost import StepWork


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A step and its sequences.

    Attributes:
        sequences: the sequences of the batch, in its order.
        epochs: `Sequence.epoch` of each when the step was scheduled; a result for another epoch is discarded.
        admitted: requests scheduled for the first time.
        num_prompt_tokens: number of prompt tokens in the step.
        work: the step's work, from which its duration is estimated.
    """

    step: Step
    sequences: list[Sequence]
    epochs: list[int]
    admitted: list[Request]
    num_prompt_tokens: int
    work: StepWork
