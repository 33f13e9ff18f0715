"""A step as the scheduler remembers it while it is in flight."""

from __future__ import annotations

from dataclasses import dataclass

from stoker_engine.core.request import Request, Sequence
from stoker_engine.core.step import Step
from stoker_engine.sched.step_cost import StepWork


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A step and whom it is for.

    Attributes:
        sequences: of the batch, in its order.
        epochs: each one's `Sequence.epoch` at that time; if it is another one later, its result is dropped.
        admitted: requests that had not been scheduled before.
        num_prompt_tokens: how many of its tokens are of prompts.
        work: what it costs time by.
    """

    step: Step
    sequences: list[Sequence]
    epochs: list[int]
    admitted: list[Request]
    num_prompt_tokens: int
    work: StepWork
