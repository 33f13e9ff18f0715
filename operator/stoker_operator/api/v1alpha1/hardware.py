"""What a pod runs on."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final

from pydantic import Field

from stoker_operator.api.rule import Rule
from stoker_operator.api.v1alpha1.base import ByName, Part, Quantity

CPU: Final = "cpu"
#: More accelerators than any node has.
MAX_COUNT: Final = 64
#: More nodes than a replica is spread over.
MAX_NODES: Final = 32
#: More accelerators than a replica is spread over.
MAX_GPUS: Final = 128

ResourceName = Annotated[str, Field(min_length=1, max_length=253)]


class ResourceClaim(Part):
    """A claim of the pod that the engine uses, as in core/v1."""

    name: Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
    """Name of an entry of resourceClaims in spec.template.spec."""
    request: Annotated[str, Field(max_length=253)] | None = None
    """Name of a request in that claim. Absent: all of the claim."""


class Resources(Part):
    """Compute resources of a pod, as in core/v1. The accelerators are not among them: they are in count."""

    limits: Annotated[dict[ResourceName, Quantity], Field(max_length=32)] | None = None
    """The most a pod may use."""
    requests: Annotated[dict[ResourceName, Quantity], Field(max_length=32)] | None = None
    """What a node must have free to take a pod. Absent: the limits."""
    claims: Annotated[list[ResourceClaim], Field(max_length=16), *ByName] | None = None
    """Claims of dynamic resource allocation that the engine uses; spec.template.spec.resourceClaims has them."""


class Hardware(Part):
    """What a replica runs on."""

    accelerator: Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
    """Key of the accelerator catalogue, such as nvidia-h100-80gb, or cpu. It decides the image, the resource that pods
    request, and what a plan counts with."""
    count: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = None
    """Accelerators of each pod. Absent: 1. A pod on accelerator cpu is one, whatever parallelism is; its ranks share
    resources."""
    nodes: Annotated[int, Field(ge=1, le=MAX_NODES)] | None = None
    """Pods of each replica, each on a node of its own. Absent: 1."""
    allow_idle: bool | None = None
    """Whether tensor × pipeline × data may be less than count × nodes, so that accelerators that are paid for idle.
    Absent: it may not."""
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
        Rule(
            field="nodes",
            holds=lambda it: it.accelerator != CPU or it.nodes in (None, 1),
            cel=f"self.accelerator != '{CPU}' || !has(self.nodes) || self.nodes == 1",
            message="accelerator cpu does not span nodes",
            remedy="remove nodes, and use spec.replicas for more copies",
        ),
        Rule(
            field="nodes",
            holds=lambda it: it.gpus <= MAX_GPUS,
            cel="(has(self.count) ? self.count : 1) * (has(self.nodes) ? self.nodes : 1) <= " + str(MAX_GPUS),
            message=f"count × nodes is more than {MAX_GPUS}, the most accelerators a replica may have",
            remedy="lower one of them, and use spec.replicas for more copies",
        ),
    )

    @property
    def accelerators(self) -> int:
        """`count`, or what its absence means."""
        return 1 if self.count is None else self.count

    @property
    def pods_per_replica(self) -> int:
        """`nodes`, or what its absence means."""
        return 1 if self.nodes is None else self.nodes

    @property
    def gpus(self) -> int:
        """Accelerators of a replica: count × nodes."""
        return self.accelerators * self.pods_per_replica
