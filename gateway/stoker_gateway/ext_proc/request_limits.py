"""What requests the picker takes in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RequestLimits:
    """What is taken in.

    Attributes:
        max_body_bytes: of a request; larger ones are refused.
        max_waiting: requests of an endpoint that wait while all its servers are saturated; others are refused.
        max_wait_s: for how many seconds. The proxy's message timeout must be longer.
    """

    max_body_bytes: int = 32 * 2**20
    max_waiting: int = 1024
    max_wait_s: float = 10.0
