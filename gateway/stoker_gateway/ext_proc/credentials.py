"""Request headers that carry API keys: the clients' keys, and the keys that servers accept."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import Final

from stoker_gateway.keys.errors import UnauthorizedError
from stoker_gateway.keys.key import Key
from stoker_gateway.keys.keyring import Keyring

AUTHORIZATION: Final = "authorization"
#: Header of Anthropic's API.
API_KEY: Final = "x-api-key"


def key_of(keyring: Keyring, header: Callable[[str], str], now: float) -> Key:
    """Return the valid key of a request. If Authorization and x-api-key both contain a key, one valid key is enough, as
    in Stoker's engine.

    Args:
        header: returns a header's value by its name in lower case; empty if it is absent.
        now: seconds since 1970.

    Raises:
        UnauthorizedError: the request has no valid key.
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
    """Return the owner of a request for a gateway without keys: a digest of the request's credentials, which are not
    stored."""
    credentials = "\n".join((header(AUTHORIZATION), header(API_KEY)))
    return blake2b(credentials.encode(), digest_size=16).hexdigest()


def swapped(authorization: str | None) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    """Return the request headers to set and those to remove, so that servers do not see the client's key.

    Args:
        authorization: the ``Authorization`` that the servers expect; None means no ``Authorization``.
    """
    if authorization is None:
        return (), (AUTHORIZATION, API_KEY)
    return ((AUTHORIZATION, authorization),), (API_KEY,)
