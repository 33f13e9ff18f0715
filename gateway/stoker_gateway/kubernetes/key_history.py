"""The current and earlier API keys of each endpoint. A server that reads its key only at start, such as vLLM's, expects
that key until it is restarted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from stoker_gateway.kubernetes.watch import Name

#: Maximum number of earlier keys of an endpoint.
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
    """Stores each endpoint's latest keys, which are not used for other endpoints."""

    def __init__(self) -> None:
        self._known: dict[Name, _Known] = {}

    def update(self, endpoint: Name, secret: str | None, key: str | None) -> tuple[str | None, ...]:
        """Record an endpoint's key, and return the keys that its servers may expect, the latest first. If the result is
        empty, the servers must get no requests.

        Args:
            secret: Secret that the endpoint names; None means that its servers need no key.
            key: key in the Secret; None if it is not known. After a change of Secret, the previous keys stay in use
                until it is known, because permission to read a Secret follows later.
        """
        before = self._known.get(endpoint)
        if secret is not None and key is None:
            return () if before is None or before.secret == secret else before.keys
        earlier = [each for each in before.keys if each != key] if before else []
        self._known[endpoint] = _Known(secret, (key, *earlier[:EARLIER]))
        return self._known[endpoint].keys

    def keep(self, endpoints: Iterable[Name]) -> None:
        """Forget all endpoints but these."""
        for endpoint in self._known.keys() - set(endpoints):
            del self._known[endpoint]
