"""A spec that obeys the rules → what its pods will be, or why there can be none."""

from __future__ import annotations

from dataclasses import dataclass

from stoker_operator.api.v1alpha1 import Spec
from stoker_operator.plan.catalogue import Catalogue
from stoker_operator.plan.placement import Placement, place


@dataclass(frozen=True)
class Plan:
    """What is decided about the pods of an endpoint.

    Attributes:
        placement: what each runs on.
        image: the container image each runs.
    """

    placement: Placement
    image: str


def plan(spec: Spec, catalogue: Catalogue) -> Plan:
    """Plans the pods of `spec`.

    Raises:
        Refused: there can be none.
    """
    placement = place(spec, catalogue)
    image = spec.engine.image or catalogue.image(spec.engine.runtime, spec.hardware.accelerator)
    return Plan(placement, image)
