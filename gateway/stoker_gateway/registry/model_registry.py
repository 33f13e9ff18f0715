"""The models and their servers.

A model registry is immutable. Each change creates a new one.
"""

from __future__ import annotations

import enum
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field


class Phase(enum.Enum):
    """Phase of an endpoint with scaling, set by the operator; the values are those of ``status.scaling.phase``."""

    ACTIVE = "Active"
    """The endpoint's ready servers get requests."""
    DRAINING = "Draining"
    """While the drain id is valid, the endpoint's servers get no new requests, so that they can be removed."""
    ZERO = "Zero"
    """The endpoint has no servers, or they are being removed."""


@dataclass(frozen=True)
class Scaling:
    """State of an endpoint's scaling by the operator or another autoscaler.

    Attributes:
        namespace, name: the InferenceEndpoint. It may have several served names, which share this object.
        hold_s: maximum time that a request waits for a ready server, in seconds.
        phase: always `Phase.ACTIVE` for another autoscaler.
        drain: the operator's last drain id, which all gateway replicas acknowledge before the last servers are removed;
            empty if there is none.
        start_failure: reason, shown to clients, why the servers do not start; empty if no failure is known.
    """

    namespace: str
    name: str
    hold_s: float
    phase: Phase = Phase.ACTIVE
    drain: str = ""
    start_failure: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """Namespace and name of the InferenceEndpoint."""
        return self.namespace, self.name


@dataclass(frozen=True)
class Endpoint:
    """Equivalent servers of one model.

    Attributes:
        name: served name of the model, the field ``model`` of requests; it may contain slashes.
        cluster: name of the Envoy cluster: unique, and safe in file names and metrics.
        servers: addresses, ``IP:PORT`` (``[IP]:PORT`` for IPv6).
        session_header: name in lower case of the request header that identifies a session; None if there is none.
        authorization: current ``Authorization`` for the servers, by which the gateway replaces a client's key; None
            means no ``Authorization``. Secret.
        earlier_authorizations: previous values, the latest first; an empty one means no ``Authorization``. A server
            that reads its key only at start accepts the value of that time until it is restarted. Secret.
        created: creation time that clients see, in seconds since 1970; 0 if it is unknown.
        refusal: reason, shown to clients, why its requests are rejected; None means that they are not.
        scaling: how the endpoint is scaled; None means that its requests are not held.
        resource: namespace and name of the InferenceEndpoint; None if the command line defines the endpoint.
    """

    name: str
    cluster: str
    servers: tuple[str, ...]
    session_header: str | None = None
    authorization: str | None = field(default=None, repr=False)
    created: int = 0
    refusal: str | None = None
    earlier_authorizations: tuple[str, ...] = field(default=(), repr=False)
    scaling: Scaling | None = None
    resource: tuple[str, str] | None = None

    @property
    def authorizations(self) -> tuple[str, ...]:
        """All values that its servers may accept, the current one first; an empty value means no ``Authorization``."""
        return (self.authorization or "", *self.earlier_authorizations)


@dataclass(frozen=True)
class ModelRegistry:
    """All endpoints, by the served name of their model."""

    endpoints: Mapping[str, Endpoint] = field(default_factory=dict)


def cluster_name(text: str) -> str:
    """Return the name of the Envoy cluster for a served name: unique, and safe in file names and metrics."""
    return f"{re.sub('[^a-z0-9]+', '-', text.lower())[:40]}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
