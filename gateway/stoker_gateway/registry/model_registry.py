"""Which models there are, and which servers they have.

A model registry is a value: whoever learns something new (from a command line, from the API server's watches) makes
another one, which goes to Envoy's configuration and to the picker.
"""

from __future__ import annotations

import enum
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field


class Phase(enum.Enum):
    """What the operator lets an endpoint with scaling do; the values are those of its status."""

    ACTIVE = "Active"
    """Its servers get requests."""
    DRAINING = "Draining"
    """Its servers get no new requests, so that they can be removed."""
    ZERO = "Zero"
    """It has no servers, or those that it has are leaving."""


@dataclass(frozen=True)
class Scaling:
    """How an endpoint is scaled, as far as it concerns the gateway: by the operator, or by an autoscaler of its own.

    Attributes:
        namespace, name: the InferenceEndpoint's. It may have several served names, which share this.
        hold_s: for how many seconds a request waits for a server that is ready.
        drain: the word by which the operator announces that the servers are to be removed; empty: none.
        start_failure: why its servers do not start, in words for clients; empty: nothing is known to be wrong.
    """

    namespace: str
    name: str
    hold_s: float
    phase: Phase = Phase.ACTIVE
    drain: str = ""
    start_failure: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """What tells the InferenceEndpoint from others."""
        return self.namespace, self.name


@dataclass(frozen=True)
class Endpoint:
    """Servers of one model, any of which may answer a request.

    Attributes:
        name: the model's served name, as requests say it; slashes are allowed.
        cluster: Envoy's name for these servers: unique, and safe in file names and metrics.
        servers: their addresses, ``IP:PORT`` (``[IP]:PORT`` for IPv6).
        session_header: the request header, in lower case, whose value keeps a session with one server.
        authorization: what its servers are told in ``Authorization`` where the gateway's own keys are in force; None:
            nothing. A secret.
        earlier_authorizations: what they were told before, the latest first: servers that read their key when they
            start want it until they are restarted. Secrets.
        created: when it came to be, as far as clients are told: seconds since 1970.
        refusal: why none of its servers gets requests though it has some, in words for clients; None: they get them.
        scaling: how it is scaled; None: it is not, and requests are not held.
        resource: namespace and name of the InferenceEndpoint; None: it is none.
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
        """All that its servers may want to be told, the current one first; empty text: nothing."""
        return (self.authorization or "", *self.earlier_authorizations)


@dataclass(frozen=True)
class ModelRegistry:
    """All endpoints, by the served name of their model."""

    endpoints: Mapping[str, Endpoint] = field(default_factory=dict)


def cluster_name(text: str) -> str:
    """What Envoy calls the servers that this text names: safe in file names and metrics, and another for each text."""
    return f"{re.sub('[^a-z0-9]+', '-', text.lower())[:40]}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
