"""By which headers clients say who they are, and servers are told who asks."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import Final

from stoker_gateway.keys.errors import UnauthorizedError
from stoker_gateway.keys.key import Key
from stoker_gateway.keys.keyring import Keyring

AUTHORIZATION: Final = "authorization"
#: Anthropic's.
API_KEY: Final = "x-api-key"


def key_of(keyring: Keyring, header: Callable[[str], str], now: float) -> Key:
    """The key that came with a request; where two came, one that holds is enough, as servers have it.

    Args:
        header: a header's value by its name; empty without one.
        now: seconds since 1970.

    Raises:
        UnauthorizedError: none came that holds.
    """
    scheme, _, bearer = header(AUTHORIZATION).strip().partition(" ")
    sent = [bearer.strip() if scheme.lower() == "bearer" else "", header(API_KEY).strip()]
    texts = list(filter(None, sent)) or [""]
    for text in texts[:-1]:
        try:
            return keyring.find(text, now)
        except UnauthorizedError:
            continue
    return keyring.find(texts[-1], now)


def digest_of(header: Callable[[str], str]) -> str:
    """Who asks, where there are no keys: who sends the same credentials is one. They are not kept."""
    credentials = "\n".join((header(AUTHORIZATION), header(API_KEY)))
    return blake2b(credentials.encode(), digest_size=16).hexdigest()


def swapped(authorization: str | None) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    """What hides a client's key from servers: headers that are set, and headers that are removed.

    Args:
        authorization: what servers are told instead, if anything.
    """
    if authorization is None:
        return (), (AUTHORIZATION, API_KEY)
    return ((AUTHORIZATION, authorization),), (API_KEY,)
