"""How clients reach the pods, and how pods are replaced."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from stoker_operator.api.rule import Rule
from stoker_operator.api.v1alpha1.base import Part

DEFAULT_PORT: Final = 8000


class Service(Part):
    """The Service in front of the pods. It has the endpoint's name."""

    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] | None = None
    """Who reaches it: the cluster, the nodes' addresses, or an address of its own. Absent: ClusterIP."""
    port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Port of the Service. Absent: 8000."""
    annotations: Annotated[dict[str, Annotated[str, Field(max_length=4096)]], Field(max_length=64)] | None = None
    """Annotations of the Service, such as those that configure a load balancer."""


class Rollout(Part):
    """How pods are replaced when the spec changes."""

    max_surge: Annotated[int, Field(ge=0, le=1000)] | None = None
    """How many pods more than replicas may run meanwhile. Absent: 1. Each needs accelerators of its own; where
    there are none to spare, set maxSurge 0 and maxUnavailable 1."""
    max_unavailable: Annotated[int, Field(ge=0, le=1000)] | None = None
    """How many replicas may be missing meanwhile. Absent: 0."""

    RULES: ClassVar = (
        Rule(
            field="",
            holds=lambda it: it.surge + it.unavailable > 0,
            cel="(has(self.maxSurge) ? self.maxSurge : 1) + (has(self.maxUnavailable) ? self.maxUnavailable : 0) > 0",
            message="maxSurge 0 and maxUnavailable 0 leave no way to replace a pod",
            remedy="set maxUnavailable to 1, or maxSurge to 1",
        ),
    )

    @property
    def surge(self) -> int:
        """`max_surge`, or what its absence means."""
        return 1 if self.max_surge is None else self.max_surge

    @property
    def unavailable(self) -> int:
        """`max_unavailable`, or what its absence means."""
        return self.max_unavailable or 0
