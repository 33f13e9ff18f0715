"""The rate limits of a key: `decide` admits or rejects a request, given the usage. This module has no state and
does no I/O."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple

from stoker_gateway.keys.key import Limits
from stoker_gateway.limits.key_usage import KeyUsage
from stoker_gateway.limits.ratelimit_headers import Allowance, Denial, RateLimitStatus
from stoker_gateway.limits.sliding_minute import SlidingMinute, until_empty, until_room

#: Retry-After in seconds, if it is unknown when the limit will have room.
SOON_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class LimitShare:
    """Share of each limit that may be used.

    Attributes:
        parts, of: ``limit * parts / of`` may be used, rounded down, but at least 1 unless the limit is 0.
    """

    parts: int = 1
    of: int = 1

    def part(self, limit: int) -> int:
        """Return the share of a limit."""
        return min(limit, max(1, limit * self.parts // self.of))


#: The whole limit.
ALL: Final = LimitShare()


class _PerMinute(NamedTuple):
    """A limit per minute, its usage, and the amount that a request needs.

    Attributes:
        full_limit: limit of all replicas together; None means unlimited.
        minutes: all usage that counts against the limit.
        requested: amount that the request needs.
    """

    resource: Literal["requests", "tokens"]
    full_limit: int | None
    minutes: Sequence[SlidingMinute]
    requested: int

    @property
    def used(self) -> int:
        """Amount used in the last minute."""
        return sum(minute.total for minute in self.minutes)

    def denial(self, share: LimitShare, now: float) -> Denial | None:
        """Return the denial of a request that would exceed the limit; None if it would not."""
        if self.full_limit is None:
            return None
        limit, used, requested = share.part(self.full_limit), self.used, self.requested
        if requested > self.full_limit:
            return Denial(self.resource, self.full_limit, used, requested, None)
        if used + requested <= limit:
            return None
        room = until_room(self.minutes, requested, limit, now)
        # A request that is larger than the share may fit once the replicas reach each other again.
        return Denial(self.resource, limit, used, requested, SOON_S if math.isinf(room) else room)

    def allowance(self, share: LimitShare, now: float, *, begins: bool) -> Allowance | None:
        """Return the status of the limit; None means unlimited. With `begins`, the requested amount counts as used."""
        if self.full_limit is None:
            return None
        limit, extra = share.part(self.full_limit), self.requested if begins else 0
        reset_s = math.floor(now) + 61 - now if extra else until_empty(self.minutes, now)
        return Allowance(limit, max(0, limit - self.used - extra), reset_s)


def decide(
    limits: Limits, uses: Sequence[KeyUsage], tokens: int, now: float, share: LimitShare = ALL
) -> RateLimitStatus | Denial:
    """Decide whether a request may start. Return the status of its key's limits, or a denial. A request may start if,
    with each limit reduced to `share`,

        requests of the last minute + 1                 ≤ requests_per_minute
        tokens of the last minute + `tokens`            ≤ tokens_per_minute
        active requests + 1                             ≤ concurrency

    If the request would exceed several limits, the denial names the limit that takes longest to have room.

    Args:
        uses: all usage that counts against the limits; expired usage must have been dropped.
        tokens: number of tokens that the request reserves.
        share: share of each limit that may be used.
    """
    requests_a_minute = _PerMinute("requests", limits.requests_per_minute, [use.requests for use in uses], 1)
    tokens_a_minute = _PerMinute("tokens", limits.tokens_per_minute, [use.tokens for use in uses], tokens)
    denials = [
        requests_a_minute.denial(share, now),
        tokens_a_minute.denial(share, now),
        _concurrency_denial(limits, uses, share),
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


def _concurrency_denial(limits: Limits, uses: Sequence[KeyUsage], share: LimitShare) -> Denial | None:
    if limits.concurrency is None:
        return None
    num_active, limit = sum(use.open for use in uses), share.part(limits.concurrency)
    return None if num_active < limit else Denial("concurrency", limit, num_active, 1, SOON_S if limit else None)
