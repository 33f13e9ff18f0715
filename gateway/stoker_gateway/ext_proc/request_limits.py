"""Limits of the requests that the picker accepts."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class RequestLimits:
    """Limits beyond which requests are rejected.

    Attributes:
        max_body_bytes: maximum size of a body.
        max_waiting: maximum number of requests of a model that wait for a server with room.
        max_wait_s: maximum time that they wait, in seconds. The proxy's message timeout must be longer.
        max_held: maximum number of held requests of an InferenceEndpoint with scaling.
        max_held_bytes: maximum size of their bodies together; at least `max_body_bytes`.
        upload_s: maximum time between two of the proxy's messages about a request, in seconds; if infinite, the proxy
            limits the upload.
    """

    max_body_bytes: int = 32 * 2**20
    max_waiting: int = 1024
    max_wait_s: float = 10.0
    max_held: int = 1000
    max_held_bytes: int = 64 * 2**20
    upload_s: float = math.inf
