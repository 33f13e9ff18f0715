"""The latest keys of each endpoint, since some servers expect an earlier one: a server that reads its key when it
starts, as vLLM's, expects the one of that time until it is restarted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from stoker_gateway.kubernetes.watch import Name

#: How many earlier keys of an endpoint are remembered.
EARLIER: Final = 3


@dataclass(frozen=True, slots=True)
class _Known:
    """Of one endpoint.

    Attributes:
        secret: which Secret the latest key was of; None: the servers wanted none.
        keys: the latest first; None: none.
    """

    secret: str | None
    keys: tuple[str | None, ...]


class KeyHistory:
    """The latest keys of each endpoint. They belong to it: no other endpoint's servers are ever sent them."""

    def __init__(self) -> None:
        self._known: dict[Name, _Known] = {}

    def update(self, endpoint: Name, secret: str | None, key: str | None) -> tuple[str | None, ...]:
        """The keys that servers of an endpoint may expect, the latest first; none at all: they get no requests.

        Args:
            secret: the Secret that the endpoint names; None: its servers want no key.
            key: what is known of it. While nothing is, and the endpoint named another one before, that one's key
                stays in force: it takes a moment until a Secret may be read.
        """
        before = self._known.get(endpoint)
        if secret is not None and key is None:
            return () if before is None or before.secret == secret else before.keys
        earlier = [each for each in before.keys if each != key] if before else []
        self._known[endpoint] = _Known(secret, (key, *earlier[:EARLIER]))
        return self._known[endpoint].keys

    def keep(self, endpoints: Iterable[Name]) -> None:
        """These are all endpoints there are."""
        for endpoint in self._known.keys() - set(endpoints):
            del self._known[endpoint]
