"""The hardware of a replica."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final

from pydantic import Field

from stoker_operator.api.rule import Rule
from stoker_operator.api.v1alpha1.base import ByName, Part, Quantity

CPU: Final = "cpu"
#: Maximum number of accelerators of a pod.
MAX_COUNT: Final = 64
#: Maximum number of pods of a replica, each on its own node.
MAX_NODES: Final = 32
#: Maximum number of accelerators of a replica.
MAX_GPUS: Final = 128

ResourceName = Annotated[str, Field(min_length=1, max_length=253)]


class ResourceClaim(Part):
    """One of the pod's resource claims, which the engine's container uses, as in core/v1."""

    name: Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
    """Name of an entry of resourceClaims in spec.template.spec."""
    request: Annotated[str, Field(max_length=253)] | None = None
    """Name of a request in that claim. Absent: all of the claim."""


class Resources(Part):
    """Resources of the engine's container, as in core/v1, except accelerators, which hardware.count states."""

    limits: Annotated[dict[ResourceName, Quantity], Field(max_length=32)] | None = None
    """Maximum amounts that the container may use."""
    requests: Annotated[dict[ResourceName, Quantity], Field(max_length=32)] | None = None
    """Amounts that a node must have free for the container. Absent: the limits."""
    claims: Annotated[list[ResourceClaim], Field(max_length=16), *ByName] | None = None
    """Claims of dynamic resource allocation that the engine uses, from spec.template.spec.resourceClaims."""


class Hardware(Part):
    """The hardware of a replica."""

    accelerator: Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
    """Name of an accelerator in the catalogue, such as nvidia-h100-80gb, or cpu. It determines the image, the resource
    that pods request, and the memory and architecture in plans."""
    count: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = None
    """Number of accelerators of each pod. Absent: 1. On accelerator cpu it is always 1: all ranks of a pod share its
    resources."""
    nodes: Annotated[int, Field(ge=1, le=MAX_NODES)] | None = None
    """Number of pods of each replica, each on its own node. Absent: 1."""
    allow_idle: bool | None = None
    """Whether tensor × pipeline × data may be less than count × nodes, so that some accelerators are idle. Absent: it
    may not."""
    resources: Resources | None = None
    """Processors, memory and other resources of the engine's container."""

    RULES: ClassVar = (
        Rule(
            field="count",
            holds=lambda it: it.accelerator != CPU or it.count in (None, 1),
            cel=f"self.accelerator != '{CPU}' || !has(self.count) || self.count == 1",
            message="count must be 1 on accelerator cpu",
            remedy="remove count, and size the pod with spec.hardware.resources",
        ),
        Rule(
            field="nodes",
            holds=lambda it: it.accelerator != CPU or it.nodes in (None, 1),
            cel=f"self.accelerator != '{CPU}' || !has(self.nodes) || self.nodes == 1",
            message="accelerator cpu does not span nodes",
            remedy="remove nodes, and use spec.replicas for more engines",
        ),
        Rule(
            field="nodes",
            holds=lambda it: it.gpus <= MAX_GPUS,
            cel="(has(self.count) ? self.count : 1) * (has(self.nodes) ? self.nodes : 1) <= " + str(MAX_GPUS),
            message=f"count × nodes is more than {MAX_GPUS}, the maximum number of accelerators of a replica",
            remedy="lower one of them, and use spec.replicas for more engines",
        ),
    )

    @property
    def accelerators(self) -> int:
        """`count`, or its default."""
        return 1 if self.count is None else self.count

    @property
    def pods_per_replica(self) -> int:
        """`nodes`, or its default."""
        return 1 if self.nodes is None else self.nodes

    @property
    def gpus(self) -> int:
        """Number of accelerators of a replica: count × nodes."""
        return self.accelerators * self.pods_per_replica
