"""A client's key: its permissions, and a digest of its text ``sk-stoker-ID-SECRET``. The text is not stored."""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass
from typing import Final

#: Valid ids of keys. Ids occur in names of Secrets, metric labels and log lines.
KEY_ID: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
#: Prefix of each key's text, by which secret scanners can recognise leaked keys.
PREFIX: Final = "sk-stoker-"
#: Maximum priority of a key; the minimum is its negative.
MAX_PRIORITY: Final = 1000

_SECRET_BYTES: Final = 24


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a key, as maximum numbers; None means unlimited.

    Attributes:
        requests_per_minute: requests that start in a minute.
        tokens_per_minute: tokens of prompts and outputs in a minute.
        concurrency: active requests.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency: int | None = None


@dataclass(frozen=True, slots=True)
class Key:
    """A key and its permissions.

    Attributes:
        id: id of the key; not secret.
        digest: digest of its text, see `digest_of`.
        models: served names that it may use; ``*`` stands for any characters. Empty means all models.
        priority: requests with a higher priority leave the gateway's queue first.
        expires: expiry time in seconds since 1970; None means never.
    """

    id: str
    digest: str
    models: tuple[str, ...] = ()
    limits: Limits = Limits()
    priority: int = 0
    expires: float | None = None

    def may_use(self, model: str) -> bool:
        """Whether the key may use the model with this served name."""
        return not self.models or any(_fits(pattern, model) for pattern in self.models)


def new_text(key_id: str) -> str:
    """Return the text of a new key, with a random secret of 24 bytes."""
    return f"{PREFIX}{key_id}-{secrets.token_hex(_SECRET_BYTES)}"


def digest_of(text: str) -> str:
    """Return the SHA-256 of a key's text in hexadecimal. It needs no salt, because the text is random."""
    return hashlib.sha256(text.encode()).hexdigest()


def _fits(pattern: str, name: str) -> bool:
    """Whether a name matches a pattern. Takes linear time in the name's length if the pieces between ``*`` are
    short."""
    first, *rest = pattern.split("*")
    if not rest:
        return pattern == name
    *middle, last = rest
    end = len(name) - len(last)
    at = len(first)
    if at > end or not name.startswith(first) or not name.endswith(last):
        return False
    for piece in middle:
        found = name.find(piece, at, end)
        if found < 0:
            return False
        at = found + len(piece)
    return True
