"""Record of the keys' usage by this replica's clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from stoker_gateway.limits.key_usage import KeyUsage

#: Maximum time that a request counts as active, in seconds, in case its end is never reported.
LONGEST_S: Final = 3600.0
#: Maximum number of active requests; beyond it the oldest request counts as ended.
MAX_GRANTS: Final = 200_000
#: Minimum interval for dropping keys without usage, in seconds.
_TIDY_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class _Granted:
    """An active request, which started at `at` and reserved `tokens` in `second`."""

    key_id: str
    tokens: int
    second: int
    at: float


class Ledger:
    """Usage of this replica's clients by key.

    Args:
        changed: called with the key's id whenever a request has ended.
    """

    def __init__(self, changed: Callable[[str], None] = lambda _: None) -> None:
        self._changed = changed
        self._uses: dict[str, KeyUsage] = {}
        self._granted: dict[str, _Granted] = {}  # the oldest first
        self._tidied_at = 0.0

    def __len__(self) -> int:
        """Number of keys with recorded usage."""
        return len(self._uses)

    @property
    def num_active(self) -> int:
        """Number of active requests."""
        return len(self._granted)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the ids of all keys with recorded usage."""
        return iter(tuple(self._uses))

    def use(self, key_id: str, now: float) -> KeyUsage:
        """Return a key's usage; the caller must not modify it."""
        self._tidy(now)
        use = self._uses.get(key_id)
        if use is None:
            return KeyUsage()
        use.expire(now)
        return use

    def begin(self, grant_id: str, key_id: str, tokens: int, now: float) -> None:
        """Record the start of a request and reserve its tokens."""
        use = self._uses.setdefault(key_id, KeyUsage())
        self._granted[grant_id] = _Granted(key_id, tokens, use.begin(tokens, now), now)
        if len(self._granted) > MAX_GRANTS:
            self.end(next(iter(self._granted)), None, now)

    def end(self, grant_id: str, tokens: int | None, now: float) -> None:
        """Record the end of a request; unknown requests are ignored.

        Args:
            tokens: number of tokens that it used; None means the reserved number.
        """
        granted = self._granted.pop(grant_id, None)
        if granted is None:
            return
        use = self._uses[granted.key_id]
        use.expire(now)
        use.end(granted.second, granted.tokens, granted.tokens if tokens is None else max(0, tokens), now)
        self._changed(granted.key_id)

    def _tidy(self, now: float) -> None:
        while self._granted and now - next(iter(self._granted.values())).at > LONGEST_S:
            self.end(next(iter(self._granted)), None, now)
        if now - self._tidied_at < _TIDY_S:
            return
        self._tidied_at = now
        for use in self._uses.values():
            use.expire(now)
        self._uses = {key_id: use for key_id, use in self._uses.items() if not use.is_empty}
