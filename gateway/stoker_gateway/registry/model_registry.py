"""The models and their servers.

A model registry is immutable. A change, from the command line or the API server, creates a new one, which is passed to
Envoy's configuration and to the picker.
"""

from __future__ import annotations

import enum
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field


class Phase(enum.Enum):
    """Phase of an endpoint with scaling, set by the operator; the values are those of ``status.phase``."""

    ACTIVE = "Active"
    """The endpoint's servers get requests."""
    DRAINING = "Draining"
    """The endpoint's servers get no new requests, so that they can be removed."""
    ZERO = "Zero"
    """The endpoint has no servers, or they are being removed."""


@dataclass(frozen=True)
class Scaling:
    """What the gateway knows about how the operator, or another autoscaler, scales an endpoint.

    Attributes:
        namespace, name: the InferenceEndpoint. It may have several served names, which share this object.
        hold_s: maximum time that a request waits for a ready server, in seconds.
        phase: current phase.
        drain: the operator's last drain id, which replicas acknowledge before servers are removed; empty if there is
            none.
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
        authorization: ``Authorization`` that the servers expect, sent if the gateway requires keys of its own; None
            means no ``Authorization``. Secret.
        earlier_authorizations: previous values, the latest first. A server that reads its key only at start accepts the
            value of that time until it is restarted. Secret.
        created: creation time for clients, in seconds since 1970.
        refusal: reason, shown to clients, why its servers get no requests; None means that they get requests.
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
