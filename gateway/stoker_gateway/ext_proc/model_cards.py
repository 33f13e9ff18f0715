"""What servers say of their models in ``/v1/models``, for clients that read it there: above all the longest context.

Servers are others', so only known fields are taken, of the kinds and sizes that they have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import orjson

#: Fields that are passed on as the first server says them.
_TEXTS: Final = ("root", "parent")
_LONGEST_TEXT: Final = 1024
_MAX_PERMISSIONS_BYTES: Final = 4096
_MAX_TOKENS: Final = 2**53


class ModelCards:
    """By server, the cards of its models."""

    def __init__(self) -> None:
        self._cards: dict[str, dict[str, dict[str, Any]]] = {}

    def update(self, server: str, answer: bytes) -> None:
        """A server's answer to ``GET /v1/models``; one that makes no sense changes nothing."""
        try:
            listed = orjson.loads(answer)["data"]
        except (ValueError, TypeError, KeyError):
            return
        cards = [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
        self._cards[server] = {each["id"]: _read(each) for each in cards if isinstance(each.get("id"), str)}

    def keep(self, servers: Iterable[str]) -> None:
        """These are all servers there are."""
        for server in self._cards.keys() - set(servers):
            del self._cards[server]

    def of(self, model: str, servers: Iterable[str]) -> dict[str, Any]:
        """What is known of a model: what its servers say, and the least of their longest contexts."""
        cards = [card for server in servers if (card := self._cards.get(server, {}).get(model)) is not None]
        known: dict[str, Any] = {}
        for card in cards:
            for name, value in card.items():
                known[name] = (
                    min(known[name], value) if name == "max_model_len" and name in known else (known.get(name, value))
                )
        return known


def _read(card: Mapping[str, Any]) -> dict[str, Any]:
    known: dict[str, Any] = {}
    longest, permission = card.get("max_model_len"), card.get("permission")
    if isinstance(longest, int) and not isinstance(longest, bool) and 0 < longest < _MAX_TOKENS:
        known["max_model_len"] = longest
    for name in _TEXTS:
        text = card.get(name, ...)
        if text is None or (isinstance(text, str) and len(text) <= _LONGEST_TEXT):
            known[name] = text
    if isinstance(permission, list) and len(orjson.dumps(permission)) <= _MAX_PERMISSIONS_BYTES:
        known["permission"] = permission
    return known
