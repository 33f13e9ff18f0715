"""What requests the picker takes in."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class RequestLimits:
    """What is taken in.

    Attributes:
        max_body_bytes: of a request; larger ones are refused.
        max_waiting: requests of an endpoint that wait while all its servers are saturated; others are refused.
        max_wait_s: for how many seconds. The proxy's message timeout must be longer.
        max_held: requests of an endpoint with scaling that are held while none of its servers is ready.
        max_held_bytes: of their bodies. One request with the longest body must have room.
        upload_s: for how many seconds the rest of a request may take to come; infinite: the proxy limits it.
    """

    max_body_bytes: int = 32 * 2**20
    max_waiting: int = 1024
    max_wait_s: float = 10.0
    max_held: int = 1000
    max_held_bytes: int = 64 * 2**20
    upload_s: float = math.inf
