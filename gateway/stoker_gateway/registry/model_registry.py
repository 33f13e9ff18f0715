"""Which models there are, and which servers they have.

A model registry is a value: whoever learns something new (from a command line, from the API server's watches) makes
another one, which goes to Envoy's configuration and to the picker.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field


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
    """

    name: str
    cluster: str
    servers: tuple[str, ...]
    session_header: str | None = None
    authorization: str | None = field(default=None, repr=False)
    created: int = 0
    refusal: str | None = None
    earlier_authorizations: tuple[str, ...] = field(default=(), repr=False)

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
