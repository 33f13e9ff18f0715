"""How a key stands with its limits, as clients are told: OpenAI's ``x-ratelimit-*`` headers.

https://platform.openai.com/docs/guides/rate-limits
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

#: All headers there are.
HEADERS: Final = tuple(
    f"x-ratelimit-{field}-{resource}"
    for resource in ("requests", "tokens")
    for field in ("limit", "remaining", "reset")
)


@dataclass(frozen=True, slots=True)
class Allowance:
    """What is left of one limit.

    Attributes:
        limit: in a minute.
        reset_s: in how many seconds all of it is there again, if nothing is used meanwhile.
    """

    limit: int
    remaining: int
    reset_s: float


@dataclass(frozen=True, slots=True)
class RateLimitStatus:
    """How a key stands; None where it has no such limit."""

    requests: Allowance | None = None
    tokens: Allowance | None = None

    def headers(self) -> dict[str, str]:
        """As clients are told."""
        headers: dict[str, str] = {}
        for resource, allowance in (("requests", self.requests), ("tokens", self.tokens)):
            if allowance is not None:
                headers[f"x-ratelimit-limit-{resource}"] = str(allowance.limit)
                headers[f"x-ratelimit-remaining-{resource}"] = str(allowance.remaining)
                headers[f"x-ratelimit-reset-{resource}"] = duration(allowance.reset_s)
        return headers


@dataclass(frozen=True, slots=True)
class Grant:
    """A request may begin.

    Attributes:
        id: by which it is settled when it has ended.
    """

    id: str
    standing: RateLimitStatus = RateLimitStatus()


@dataclass(frozen=True, slots=True)
class Denial:
    """A request may not begin.

    Attributes:
        what: the limit that it would exceed.
        limit: how much that is; of two replicas that do not reach each other, each one's part.
        used: how much of it is in use.
        requested: how much more the request wants.
        retry_after_s: when there is room; None: never, since the request alone is more than the limit.
    """

    what: Literal["requests", "tokens", "concurrency"]
    limit: int
    used: int
    requested: int
    retry_after_s: float | None
    standing: RateLimitStatus = RateLimitStatus()


def duration(seconds: float) -> str:
    """A duration as OpenAI writes it: ``12ms``, ``8.64s``, ``6m0s``; rounded up to a millisecond."""
    milliseconds = math.ceil(round(seconds * 1000, 3))
    if milliseconds < 1000:
        return f"{milliseconds}ms" if milliseconds else "0s"
    minutes, milliseconds = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    text = f"{milliseconds / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    if hours:
        return f"{hours}h{minutes}m{text}"
    return f"{minutes}m{text}" if minutes else text
