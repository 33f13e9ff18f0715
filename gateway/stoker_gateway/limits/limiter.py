"""Admits requests by the limits of their keys (`rate_limit.decide` has the rule), and takes in what they used."""

from __future__ import annotations

import itertools
import secrets
from typing import Protocol

from stoker_gateway.keys.key import Key
from stoker_gateway.limits.ledger import Ledger
from stoker_gateway.limits.rate_limit import decide
from stoker_gateway.limits.ratelimit_headers import Denial, Grant


class Limiter(Protocol):
    """Keeps keys to their limits. Used from one event loop."""

    async def reserve(self, key: Key, tokens: int, now: float) -> Grant | Denial:
        """Whether a request may begin.

        Args:
            tokens: that it will use at most, as far as one knows.
            now: seconds of any clock, the same for all calls.
        """

    def settle(self, grant_id: str, tokens: int | None, now: float) -> None:
        """A request has ended. One that is not under way, or was settled before, is left alone.

        Args:
            tokens: that it used; None where nobody knows: those that were reserved.
        """


class LocalLimiter:
    """Keeps keys to their limits where this is the only gateway."""

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
    """Ids of grants; no other process has the same."""
    prefix = secrets.token_hex(8)
    return itertools.chain.from_iterable([f"{prefix}-{number}"] for number in itertools.count())
