"""The set of all keys with valid manifests. A keyring is immutable; a change of keys creates a new one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from stoker_gateway.keys import values
from stoker_gateway.keys.errors import UnauthorizedError
from stoker_gateway.keys.key import Key, digest_of

_SEND: Final = "send 'Authorization: Bearer sk-stoker-…'"


class Keyring:
    """Finds keys by their text.

    Args:
        keys: keys with unique ids and digests.

    Raises:
        ValueError: two keys have the same id or digest.
    """

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        every = tuple(keys)
        #: The keys by their id.
        self.keys = {key.id: key for key in every}
        self._by_digest = {key.digest: key for key in every}
        if not len(every) == len(self.keys) == len(self._by_digest):
            raise ValueError("two keys have the same id, or the same digest")

    def __len__(self) -> int:
        return len(self.keys)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Keyring) and self.keys == other.keys

    __hash__ = None  # type: ignore[assignment]

    def find(self, text: str, now: float) -> Key:
        """Return the key with this text.

        Args:
            now: seconds since 1970.

        Raises:
            UnauthorizedError: there is no such key, or it has expired.
        """
        if not text:
            raise UnauthorizedError(f"no API key was sent; {_SEND}")
        key = self._by_digest.get(digest_of(text))
        if key is None:
            raise UnauthorizedError(
                "this API key is unknown, or was revoked; check that it is complete, or ask the gateway's administrator"
                " for another"
            )
        if key.expires is not None and now >= key.expires:
            until = values.moment_text(key.expires)
            raise UnauthorizedError(f"the API key {key.id!r} expired at {until}; ask the administrator for another")
        return key
