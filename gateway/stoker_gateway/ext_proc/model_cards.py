"""Fields of the servers' ``/v1/models`` that the gateway passes on, such as the maximum context length.

Servers are not trusted: only known fields are used, after a check of their types and sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import orjson

#: Text fields of a model card that are passed on.
_TEXTS: Final = ("root", "parent")
_LONGEST_TEXT: Final = 1024
_MAX_PERMISSIONS_BYTES: Final = 4096
_MAX_TOKENS: Final = 2**53


class ModelCards:
    """Model cards of each server."""

    def __init__(self) -> None:
        self._cards: dict[str, dict[str, dict[str, Any]]] = {}

    def update(self, server: str, answer: bytes) -> None:
        """Record the model cards in the body of a server's response to ``GET /v1/models``."""
        try:
            listed = orjson.loads(answer)["data"]
        except (ValueError, TypeError, KeyError):
            return
        cards = [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
        self._cards[server] = {each["id"]: _read(each) for each in cards if isinstance(each.get("id"), str)}

    def keep(self, servers: Iterable[str]) -> None:
        """Remove the cards of servers that are not in `servers`."""
        for server in self._cards.keys() - set(servers):
            del self._cards[server]

    def of(self, model: str, servers: Iterable[str]) -> dict[str, Any]:
        """Return the known fields of a model: ``max_model_len`` is the minimum over its servers, another field is that
        of the first server that has it."""
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
