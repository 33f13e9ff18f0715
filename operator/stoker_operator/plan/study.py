"""What the planner finds: a plan, and all that was considered on the way to it."""

from __future__ import annotations

from dataclasses import dataclass

from stoker_operator.api.violation import Violation
from stoker_operator.plan.estimate import Estimate
from stoker_operator.plan.options import Advice, Option
from stoker_operator.plan.placement import Placement


@dataclass(frozen=True)
class Plan:
    """What is decided about the pods of an endpoint.

    Attributes:
        placement: what each runs on.
        image: the container image each runs.
        estimate: what will be in an accelerator's memory; None where the model's shape is not known.
        unknown: why it is not known.
        max_model_len: the longest sequence, as the engine is given it; None leaves it to the engine.
        warnings: sentences for the spec's author on what is planned: a length that was cut, what the
            runtime's release does not do yet.
        chosen_by: which field of the spec left the sizes to the planner; empty: none did.
    """

    placement: Placement
    image: str
    estimate: Estimate | None = None
    unknown: str = ""
    max_model_len: int | None = None
    warnings: tuple[str, ...] = ()
    chosen_by: str = ""


@dataclass(frozen=True)
class Study:
    """All that was considered on the way to a plan.

    Attributes:
        placement: what the spec states.
        image: the container image; empty where there is none.
        chosen: the verdict on what the spec states.
        options: the ways that use all accelerators, the one in the spec among them.
        unknown: why the model's shape is not known; empty where it is.
        max_model_len: what the engine is to be given.
        refused: what the catalogue does not allow.
        unplannable: why model and accelerators do not go together so.
        warnings, chosen_by: as in `Plan`.
        advice: what is recommended; None where nothing is possible, or nothing is known of the model, or where it was
            not looked for.
        wanted_len: the length that is to be served; 0 where it is not known.
    """

    placement: Placement
    image: str
    chosen: Option
    options: tuple[Option, ...]
    unknown: str
    max_model_len: int | None
    refused: tuple[Violation, ...]
    unplannable: tuple[Violation, ...]
    warnings: tuple[str, ...]
    chosen_by: str = ""
    advice: Advice | None = None
    wanted_len: int = 0
