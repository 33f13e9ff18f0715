"""A key: what its holder may use, and how much. Its text is known to its holder alone; here is a digest of it.

sk-stoker-ID-SECRET
"""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass
from typing import Final

#: What a key may be called: it is part of an object's name, of metrics' labels and of log lines.
KEY_ID: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
#: How the text of each key begins, so that who finds one knows what it is.
PREFIX: Final = "sk-stoker-"
#: Priorities are from -1000 to 1000.
MAX_PRIORITY: Final = 1000

_SECRET_BYTES: Final = 24


@dataclass(frozen=True, slots=True)
class Limits:
    """How much a key may use; None is without a limit.

    Attributes:
        requests_per_minute: that begin.
        tokens_per_minute: of prompts and answers.
        concurrency: requests at once.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency: int | None = None


@dataclass(frozen=True, slots=True)
class Key:
    """What the holder of a key may use.

    Attributes:
        id: its name; no secret.
        digest: of its text, see `digest_of`.
        models: served names; ``*`` in them stands for any characters. None of them: all models.
        priority: the higher, the earlier its requests' turn among those that wait.
        expires: until when it holds, in seconds since 1970; None: for ever.
    """

    id: str
    digest: str
    models: tuple[str, ...] = ()
    limits: Limits = Limits()
    priority: int = 0
    expires: float | None = None

    def may_use(self, model: str) -> bool:
        """Whether it is for the model of this served name."""
        return not self.models or any(_fits(pattern, model) for pattern in self.models)


def new_text(key_id: str) -> str:
    """The text of a new key, which nobody can guess."""
    return f"{PREFIX}{key_id}-{secrets.token_hex(_SECRET_BYTES)}"


def digest_of(text: str) -> str:
    """What is kept of a key's text: SHA-256 in hexadecimal. The text is random, so it needs no salt."""
    return hashlib.sha256(text.encode()).hexdigest()


def _fits(pattern: str, name: str) -> bool:
    """Whether a name fits a pattern, in linear time but for the length of its pieces."""
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
