"""The rate limits of a key: whether a request may begin, by what is in use. Pure; `decide` is the decision."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple

from stoker_gateway.keys.key import Limits
from stoker_gateway.limits.key_usage import KeyUsage
from stoker_gateway.limits.ratelimit_headers import Allowance, Denial, RateLimitStatus
from stoker_gateway.limits.sliding_minute import SlidingMinute, until_empty, until_room

#: When to try again, in seconds, where only the end of another request makes room.
SOON_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class LimitShare:
    """A part of each limit.

    Attributes:
        parts, of: ``parts / of``; never less than 1 of a limit that is not 0.
    """

    parts: int = 1
    of: int = 1

    def part(self, limit: int) -> int:
        """The part of a limit."""
        return min(limit, max(1, limit * self.parts // self.of))


#: All of it.
ALL: Final = LimitShare()


class _PerMinute(NamedTuple):
    """A limit per minute, and what a request wants of it.

    Attributes:
        full_limit: of all replicas; None: unlimited.
        minutes: what is used, by replica.
        requested: how much the request wants.
    """

    resource: Literal["requests", "tokens"]
    full_limit: int | None
    minutes: Sequence[SlidingMinute]
    requested: int

    @property
    def used(self) -> int:
        """How much was used in the last minute."""
        return sum(minute.total for minute in self.minutes)

    def denial(self, share: LimitShare, now: float) -> Denial | None:
        """Why the request may not begin; None: it may."""
        if self.full_limit is None:
            return None
        limit, used, requested = share.part(self.full_limit), self.used, self.requested
        if requested > self.full_limit:
            return Denial(self.resource, self.full_limit, used, requested, None)
        if used + requested <= limit:
            return None
        room = until_room(self.minutes, requested, limit, now)
        # What is more than a part of the limit may begin once the parts are one again.
        return Denial(self.resource, limit, used, requested, SOON_S if math.isinf(room) else room)

    def allowance(self, share: LimitShare, now: float, *, begins: bool) -> Allowance | None:
        """What is left, by whether the request begins; None: unlimited."""
        if self.full_limit is None:
            return None
        limit, extra = share.part(self.full_limit), self.requested if begins else 0
        reset_s = math.floor(now) + 61 - now if extra else until_empty(self.minutes, now)
        return Allowance(limit, max(0, limit - self.used - extra), reset_s)


def decide(
    limits: Limits, uses: Sequence[KeyUsage], tokens: int, now: float, share: LimitShare = ALL
) -> RateLimitStatus | Denial:
    """Whether a request may begin, and how its key stands then. It may while

        requests of the last minute + 1                        ≤ requests_per_minute
        tokens of the last minute + those that it reserves     ≤ tokens_per_minute
        requests under way + 1                                 ≤ concurrency

    Of several limits that it would exceed, the denial names the one that takes longest to have room.

    Args:
        uses: all that counts against the limits, without what is older than a minute.
        tokens: that the request reserves.
        share: of the limits, that may be used.
    """
    requests_a_minute = _PerMinute("requests", limits.requests_per_minute, [use.requests for use in uses], 1)
    tokens_a_minute = _PerMinute("tokens", limits.tokens_per_minute, [use.tokens for use in uses], tokens)
    denials = [
        requests_a_minute.denial(share, now),
        tokens_a_minute.denial(share, now),
        _too_many_under_way(limits, uses, share),
    ]
    longest = max(
        filter(None, denials),
        key=lambda denial: math.inf if denial.retry_after_s is None else denial.retry_after_s,
        default=None,
    )
    standing = RateLimitStatus(
        requests_a_minute.allowance(share, now, begins=longest is None),
        tokens_a_minute.allowance(share, now, begins=longest is None),
    )
    return standing if longest is None else replace(longest, standing=standing)


def _too_many_under_way(limits: Limits, uses: Sequence[KeyUsage], share: LimitShare) -> Denial | None:
    if limits.concurrency is None:
        return None
    under_way, limit = sum(use.open for use in uses), share.part(limits.concurrency)
    return None if under_way < limit else Denial("concurrency", limit, under_way, 1, SOON_S if limit else None)
