"""What the clients of this gateway use, by key, and which of their requests are under way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from stoker_gateway.limits.key_usage import KeyUsage

#: For how many seconds a request counts as under way, at most, so that one whose end nobody told is not for ever.
LONGEST_S: Final = 3600.0
#: How many may be under way, at most: then the oldest are taken to have ended.
MAX_GRANTS: Final = 200_000
#: Seconds between looks for keys that are not in use.
_TIDY_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class _Granted:
    """A request under way."""

    key_id: str
    tokens: int
    second: int
    at: float


class Ledger:
    """What is in use, by key.

    Args:
        changed: told the id of each key of which another request has ended.
    """

    def __init__(self, changed: Callable[[str], None] = lambda _: None) -> None:
        self._changed = changed
        self._uses: dict[str, KeyUsage] = {}
        self._granted: dict[str, _Granted] = {}  # the oldest first
        self._tidied_at = 0.0

    def __len__(self) -> int:
        """How many keys are in use."""
        return len(self._uses)

    @property
    def under_way(self) -> int:
        """How many requests have not ended."""
        return len(self._granted)

    def __iter__(self) -> Iterator[str]:
        """The ids of all keys in use."""
        return iter(tuple(self._uses))

    def use(self, key_id: str, now: float) -> KeyUsage:
        """What is in use of a key; it is nobody's to change."""
        self._tidy(now)
        use = self._uses.get(key_id)
        if use is None:
            return KeyUsage()
        use.expire(now)
        return use

    def begin(self, grant_id: str, key_id: str, tokens: int, now: float) -> None:
        """A request begins, for which so many tokens are reserved."""
        use = self._uses.setdefault(key_id, KeyUsage())
        self._granted[grant_id] = _Granted(key_id, tokens, use.begin(tokens, now), now)
        if len(self._granted) > MAX_GRANTS:
            self.end(next(iter(self._granted)), None, now)

    def end(self, grant_id: str, tokens: int | None, now: float) -> None:
        """A request has ended. One that is not under way is left alone.

        Args:
            tokens: that it used; None where nobody knows: those that were reserved.
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
        self._uses = {key_id: use for key_id, use in self._uses.items() if not use.is_nothing}
