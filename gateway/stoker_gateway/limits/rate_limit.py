"""Whether a request may begin, by what is in use. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

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


def decide(
    limits: Limits, uses: Sequence[KeyUsage], tokens: int, now: float, share: LimitShare = ALL
) -> RateLimitStatus | Denial:
    """Whether a request may begin, and how its key stands then.

    Args:
        uses: all that counts against the limits, without what is older than a minute.
        tokens: that the request reserves.
        share: of the limits, that may be used.
    """
    denials = list(_denials(limits, uses, tokens, now, share))
    if not denials:
        return _standing(limits, uses, 1, tokens, now, share)
    worst = max(denials, key=lambda each: math.inf if each.retry_after_s is None else each.retry_after_s)
    standing = _standing(limits, uses, 0, 0, now, share)
    return Denial(worst.what, worst.limit, worst.used, worst.requested, worst.retry_after_s, standing)


def _denials(limits: Limits, uses: Sequence[KeyUsage], tokens: int, now: float, share: LimitShare) -> Iterable[Denial]:
    if limits.requests_per_minute is not None:
        yield from _denial("requests", limits.requests_per_minute, [each.requests for each in uses], 1, now, share)
    if limits.tokens_per_minute is not None:
        yield from _denial("tokens", limits.tokens_per_minute, [each.tokens for each in uses], tokens, now, share)
    if limits.concurrency is not None:
        under_way, limit = sum(each.open for each in uses), share.part(limits.concurrency)
        if under_way + 1 > limit:
            yield Denial("concurrency", limit, under_way, 1, SOON_S if limit else None)


def _denial(
    resource: Literal["requests", "tokens"],
    full_limit: int,
    minutes: list[SlidingMinute],
    amount: int,
    now: float,
    share: LimitShare,
) -> Iterable[Denial]:
    limit, used = share.part(full_limit), sum(each.total for each in minutes)
    if amount > full_limit:
        yield Denial(resource, full_limit, used, amount, None)
    elif used + amount > limit:
        room = until_room(minutes, amount, limit, now)
        # What is more than a part of the limit may begin once the parts are one again.
        yield Denial(resource, limit, used, amount, SOON_S if math.isinf(room) else room)


def _standing(
    limits: Limits, uses: Sequence[KeyUsage], requests: int, tokens: int, now: float, share: LimitShare
) -> RateLimitStatus:
    return RateLimitStatus(
        _allowance(limits.requests_per_minute, [each.requests for each in uses], requests, now, share),
        _allowance(limits.tokens_per_minute, [each.tokens for each in uses], tokens, now, share),
    )


def _allowance(
    full_limit: int | None, minutes: list[SlidingMinute], extra: int, now: float, share: LimitShare
) -> Allowance | None:
    if full_limit is None:
        return None
    limit, used = share.part(full_limit), sum(each.total for each in minutes) + extra
    reset_s = math.floor(now) + 61 - now if extra else until_empty(minutes, now)
    return Allowance(limit, max(0, limit - used), reset_s)
