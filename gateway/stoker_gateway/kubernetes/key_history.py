"""The current and earlier API keys of each endpoint. A server that reads its key only at start, such as vLLM's, expects
an earlier key until it is restarted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from stoker_gateway.kubernetes.watch import Name

#: Number of earlier keys to keep for an endpoint.
EARLIER: Final = 3


@dataclass(frozen=True, slots=True)
class _Known:
    """Keys of one endpoint.

    Attributes:
        secret: Secret of the latest key; None means that the servers need no key.
        keys: the keys, the latest first; the element None means a request without a key.
    """

    secret: str | None
    keys: tuple[str | None, ...]


class KeyHistory:
    """Stores the latest keys of each endpoint. A key is never sent to another endpoint's servers."""

    def __init__(self) -> None:
        self._known: dict[Name, _Known] = {}

    def update(self, endpoint: Name, secret: str | None, key: str | None) -> tuple[str | None, ...]:
        """Return the keys that an endpoint's servers may expect, the latest first. If the result is empty, the servers
        must get no requests.

        Args:
            endpoint: namespace and name of the endpoint.
            secret: Secret that the endpoint names; None means that its servers need no key.
            key: key in the Secret; None if it is not known. If the endpoint has just changed to this Secret, the keys
                of the previous one stay in use, because it takes a moment until the gateway may read a Secret.
        """
        before = self._known.get(endpoint)
        if secret is not None and key is None:
            return () if before is None or before.secret == secret else before.keys
        earlier = [each for each in before.keys if each != key] if before else []
        self._known[endpoint] = _Known(secret, (key, *earlier[:EARLIER]))
        return self._known[endpoint].keys

    def keep(self, endpoints: Iterable[Name]) -> None:
        """Drop the keys of all other endpoints."""
        for endpoint in self._known.keys() - set(endpoints):
            del self._known[endpoint]
