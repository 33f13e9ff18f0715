"""Which keys the servers of each endpoint have been told, since some want an earlier one: a server that reads its key
when it starts, as vLLM's, wants the one of that time until it is restarted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from stoker_gateway.kubernetes.watch import Name

#: How many earlier keys of an endpoint are remembered.
EARLIER: Final = 3


@dataclass(frozen=True, slots=True)
class _Told:
    """Of one endpoint.

    Attributes:
        secret: which Secret the latest key was of; None: the servers wanted none.
        keys: the latest first; None: none.
    """

    secret: str | None
    keys: tuple[str | None, ...]


class ToldKeys:
    """The latest keys of each endpoint. They are an endpoint's: no other one's servers are ever told them."""

    def __init__(self) -> None:
        self._told: dict[Name, _Told] = {}

    def tell(self, endpoint: Name, secret: str | None, key: str | None) -> tuple[str | None, ...]:
        """What the servers of an endpoint may want to be told, the latest first; nothing: they get no requests.

        Args:
            secret: the Secret that the endpoint names; None: its servers want no key.
            key: what is known of it. While nothing is, and the endpoint named another one before, that one's key
                stays in force: it takes a moment until a Secret may be read.
        """
        before = self._told.get(endpoint)
        if secret is not None and key is None:
            return () if before is None or before.secret == secret else before.keys
        earlier = [each for each in before.keys if each != key] if before else []
        self._told[endpoint] = _Told(secret, (key, *earlier[:EARLIER]))
        return self._told[endpoint].keys

    def keep(self, endpoints: Iterable[Name]) -> None:
        """These are all endpoints there are."""
        for gone in self._told.keys() - set(endpoints):
            del self._told[gone]
