"""The Service by which clients reach the pods."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from stoker_operator.api.v1alpha1.base import METADATA_KEYS, Annotations, Labels, Part, without_own_labels

DEFAULT_PORT: Final = 8000


class Service(Part):
    """The Service in front of the pods. It has the endpoint's name."""

    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] | None = None
    """Type of the Service: reachable inside the cluster, at the nodes' addresses, or at a load balancer's address.
    Absent: ClusterIP."""
    port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Port of the Service. Absent: 8000."""
    labels: Labels | None = None
    """Additional labels of the Service, such as those by which a load balancer's address pool or policy selects it. The
    labels by which the operator selects it cannot be set."""
    annotations: Annotations | None = None
    """Annotations of the Service, such as those that configure a load balancer."""

    RULES: ClassVar = (without_own_labels("the Service"), *METADATA_KEYS)
