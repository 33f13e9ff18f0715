"""Usage of other replicas' clients: each replica's last statement for a key, and requests admitted since.

A statement contains the complete usage of a key by a replica's clients, and replaces the previous one. So it makes up
for lost messages, and includes requests that the replica admitted by itself. Times are sent as ages, so clocks need
not be synchronised.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, Final

from stoker_gateway.limits.key_usage import KeyUsage

#: Seconds without a statement or admission after which a replica's active requests with a key count as ended.
STALE_S: Final = 30.0
#: Minimum interval for dropping keys without usage, in seconds.
_TIDY_S: Final = 60.0

Statement = dict[str, Any]


def statement(use: KeyUsage, now: float) -> Statement:
    """Return the statement of a key's usage: ``[age in seconds, amount]`` pairs, and the number of active requests."""
    return {
        "requests": [[math.floor(age * 1000) / 1000, number] for age, number in use.requests.ages(now)],
        "tokens": [[math.floor(age * 1000) / 1000, number] for age, number in use.tokens.ages(now)],
        "open": use.open,
    }


class PeerReports:
    """Other replicas' usage, by key and replica."""

    def __init__(self) -> None:
        self._uses: dict[str, dict[str, KeyUsage]] = {}
        self._reported_at: dict[tuple[str, str], float] = {}
        self._tidied_at = 0.0

    def __len__(self) -> int:
        """Number of keys with recorded usage."""
        return len(self._uses)

    def record(self, replica: str, key_id: str, report: Statement, now: float) -> None:
        """Record a replica's statement of a key's usage."""
        use = KeyUsage()
        for minute, name in ((use.requests, "requests"), (use.tokens, "tokens")):
            for age, number in report[name]:
                minute.add(number, now - age)
        use.open = report["open"]
        self._uses.setdefault(key_id, {})[replica] = use
        self._reported_at[key_id, replica] = now

    def begin(self, replica: str, key_id: str, tokens: int, now: float) -> None:
        """Count a request that a replica has started. The replica's next statement for the key replaces this count."""
        self._uses.setdefault(key_id, {}).setdefault(replica, KeyUsage()).begin(tokens, now)
        self._reported_at[key_id, replica] = now

    def uses(self, key_id: str, now: float, without: Collection[str] = ()) -> list[KeyUsage]:
        """Return the other replicas' usage of a key.

        Args:
            without: replicas to leave out.
        """
        self._tidy(now)
        return [use for replica, use in self._current(key_id, now).items() if replica not in without]

    def _current(self, key_id: str, now: float) -> dict[str, KeyUsage]:
        uses = self._uses.get(key_id, {})
        for replica, use in uses.items():
            use.expire(now)
            if now - self._reported_at.get((key_id, replica), -math.inf) > STALE_S:
                use.open = 0
        return uses

    def _tidy(self, now: float) -> None:
        if now - self._tidied_at < _TIDY_S:
            return
        self._tidied_at = now
        for key_id in list(self._uses):
            for replica, use in list(self._current(key_id, now).items()):
                if use.is_empty:
                    del self._uses[key_id][replica]
                    self._reported_at.pop((key_id, replica), None)
            if not self._uses[key_id]:
                del self._uses[key_id]
