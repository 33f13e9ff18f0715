"""Admission of requests by their keys' limits (the rule is `rate_limit.decide`), and recording of the keys' usage."""

from __future__ import annotations

import itertools
import secrets
from typing import Protocol

from stoker_gateway.keys.key import Key
from stoker_gateway.limits.ledger import Ledger
from stoker_gateway.limits.rate_limit import decide
from stoker_gateway.limits.ratelimit_headers import Denial, Grant


class Limiter(Protocol):
    """Enforces the limits of keys. Used from one event loop."""

    async def reserve(self, key: Key, tokens: int, now: float) -> Grant | Denial:
        """Admit a request and reserve its tokens, or reject it.

        Args:
            tokens: estimate of the maximum number of tokens that it will use.
            now: time in seconds, by the same clock in all calls.
        """

    def settle(self, grant_id: str, tokens: int | None, now: float) -> None:
        """Record the end of a request; unknown and already settled requests are ignored.

        Args:
            tokens: number of tokens that it used; None means the reserved number.
        """


class LocalLimiter:
    """Limiter of a gateway with a single replica."""

    def __init__(self) -> None:
        self._ledger = Ledger()
        self._ids = grant_ids()

    async def reserve(self, key: Key, tokens: int, now: float) -> Grant | Denial:
        """See `Limiter`."""
        tokens = max(0, tokens)
        verdict = decide(key.limits, [self._ledger.use(key.id, now)], tokens, now)
        if isinstance(verdict, Denial):
            return verdict
        grant = Grant(next(self._ids), verdict)
        self._ledger.begin(grant.id, key.id, tokens, now)
        return grant

    def settle(self, grant_id: str, tokens: int | None, now: float) -> None:
        """See `Limiter`."""
        self._ledger.end(grant_id, tokens, now)


def grant_ids() -> itertools.chain[str]:
    """Return an iterator of grant ids that are unique across processes."""
    prefix = secrets.token_hex(8)
    return itertools.chain.from_iterable([f"{prefix}-{number}"] for number in itertools.count())
