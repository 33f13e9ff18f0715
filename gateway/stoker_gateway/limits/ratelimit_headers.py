"""Admission or rejection of a request, with the status of its key's limits for OpenAI's ``x-ratelimit-*`` headers.

https://platform.openai.com/docs/guides/rate-limits
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

#: Names of the headers ``x-ratelimit-*``.
HEADERS: Final = tuple(
    f"x-ratelimit-{field}-{resource}"
    for resource in ("requests", "tokens")
    for field in ("limit", "remaining", "reset")
)


@dataclass(frozen=True, slots=True)
class Allowance:
    """Status of one limit per minute.

    Attributes:
        limit: the key's limit, or the part of it that may be used (see `LimitShare`).
        remaining: amount that is left of it.
        reset_s: seconds until all of it is available again, if nothing is used meanwhile.
    """

    limit: int
    remaining: int
    reset_s: float


@dataclass(frozen=True, slots=True)
class RateLimitStatus:
    """Status of a key's limits per minute; None for a limit that the key does not have."""

    requests: Allowance | None = None
    tokens: Allowance | None = None

    def headers(self) -> dict[str, str]:
        """Return the response headers."""
        headers: dict[str, str] = {}
        for resource, allowance in (("requests", self.requests), ("tokens", self.tokens)):
            if allowance is not None:
                headers[f"x-ratelimit-limit-{resource}"] = str(allowance.limit)
                headers[f"x-ratelimit-remaining-{resource}"] = str(allowance.remaining)
                headers[f"x-ratelimit-reset-{resource}"] = duration(allowance.reset_s)
        return headers


@dataclass(frozen=True, slots=True)
class Grant:
    """Admission of a request.

    Attributes:
        id: id for settling the request when it has ended.
        standing: status of the key's limits.
    """

    id: str
    standing: RateLimitStatus = RateLimitStatus()


@dataclass(frozen=True, slots=True)
class Denial:
    """Rejection of a request.

    Attributes:
        what: limit that the request would exceed.
        limit: share of the key's limit that may be used (see `LimitShare`); the whole limit if the request alone
            exceeds it.
        used: amount in use.
        requested: amount that the request needs.
        retry_after_s: seconds after which to retry; None if the request alone exceeds the key's limit.
        standing: status of the key's limits.
    """

    what: Literal["requests", "tokens", "concurrency"]
    limit: int
    used: int
    requested: int
    retry_after_s: float | None
    standing: RateLimitStatus = RateLimitStatus()


def duration(seconds: float) -> str:
    """Format a duration as OpenAI does: ``12ms``, ``8.64s``, ``6m0s``; rounded up to a millisecond."""
    milliseconds = math.ceil(round(seconds * 1000, 3))
    if milliseconds < 1000:
        return f"{milliseconds}ms" if milliseconds else "0s"
    minutes, milliseconds = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    text = f"{milliseconds / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    if hours:
        return f"{hours}h{minutes}m{text}"
    return f"{minutes}m{text}" if minutes else text
