"""Results of the planner: a plan, and a study of the layouts."""

from __future__ import annotations

from dataclasses import dataclass

from stoker_operator.api.violation import Violation
from stoker_operator.plan.estimate import Estimate
from stoker_operator.plan.options import Advice, Option
from stoker_operator.plan.placement import Placement


@dataclass(frozen=True)
class Plan:
    """The plan of an endpoint's pods.

    Attributes:
        placement: accelerators of a pod and how they share the model.
        image: container image of the engine.
        estimate: estimated memory use of an engine; None if it cannot be estimated.
        unknown: why it cannot be estimated; empty if it can.
        max_model_len: maximum length of a sequence in tokens, as passed to the engine; None if the engine chooses it.
        warnings: warnings to the spec's author, for example about a limited length, or about values that the runtime's
            release does not support.
        chosen_by: field of the spec that lets the planner choose the sizes; empty otherwise.
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
    """All results of the planner for a spec.

    Attributes:
        placement: placement by the sizes of the spec, or by those that the planner chose in mode ``Auto``.
        image: container image of the engine; empty if there is none.
        chosen: evaluation of the layout of `placement`.
        options: the evaluated layouts, `chosen` among them.
        unknown, max_model_len: as in `Plan`.
        refused: why there is no image.
        unplannable: why the model cannot run in this way.
        warnings, chosen_by: as in `Plan`.
        advice: recommended layout; None if none is known to be possible, or only `chosen` was evaluated.
        wanted_len: requested sequence length in tokens; 0 if not known.
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
