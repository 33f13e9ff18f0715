"""What a pod runs on, and how the model is spread over it."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final

from pydantic import Field

from stoker_operator.api.rule import Rule
from stoker_operator.api.v1alpha1.base import Part, Quantity

CPU: Final = "cpu"
#: More accelerators than any node has.
MAX_COUNT: Final = 64

ResourceName = Annotated[str, Field(min_length=1, max_length=253)]


class Resources(Part):
    """Compute resources of a pod, as in core/v1. The accelerators are not among them: count says how many."""

    limits: Annotated[dict[ResourceName, Quantity], Field(max_length=32)] | None = None
    """The most a pod may use."""
    requests: Annotated[dict[ResourceName, Quantity], Field(max_length=32)] | None = None
    """What a node must have free to take a pod. Absent: the limits."""


class Hardware(Part):
    """What one pod runs on."""

    accelerator: Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
    """Key of the accelerator catalogue, such as nvidia-h100-80gb, or cpu. It decides the image, the resource that is
    asked of the nodes, and what a plan counts with."""
    count: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = None
    """Accelerators of each pod. Absent: 1."""
    resources: Resources | None = None
    """Processors, memory and other resources of each pod."""

    RULES: ClassVar = (
        Rule(
            field="count",
            holds=lambda it: it.accelerator != CPU or it.count in (None, 1),
            cel=f"self.accelerator != '{CPU}' || !has(self.count) || self.count == 1",
            message="accelerator cpu is not counted: a pod is one",
            remedy="remove count, and size the pod with spec.hardware.resources",
        ),
    )

    @property
    def accelerators(self) -> int:
        """`count`, or what its absence means."""
        return 1 if self.count is None else self.count


class Parallelism(Part):
    """How the accelerators of a pod share the work. tensor × data must equal hardware.count. Both absent: tensor takes
    all of them and data is 1; one of them given: the other is what is left."""

    tensor: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = None
    """Accelerators each copy of the model is split over."""
    data: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = None
    """Copies of the model in a pod, each with its own accelerators and its own requests."""
