"""Which of an endpoint's keys each of its servers takes: one that reads its key when it starts, as vLLM's, takes the
key of that time until it is restarted, and one that reads it from a file takes a new one some time after it is written.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from stoker_gateway.registry.model_registry import Endpoint

logger = logging.getLogger(__name__)

#: For how many seconds a server that left is remembered.
REMEMBERED_S: Final = 300.0


class ServerKeys:
    """By server, the last ``Authorization`` that it answered to.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left_at: dict[str, float] = {}
        self._taken: dict[str, str] = {}
        #: By server, the key in force when a warning said that it wants an earlier one.
        self._warned: dict[str, str] = {}

    def accepted(self, server: str, authorization: str, endpoints: Iterable[Endpoint] = ()) -> None:
        """A server, of these endpoints or of none of them, has answered to this; empty: to nothing."""
        self._taken[server] = authorization
        for endpoint in endpoints:
            current = endpoint.authorizations[0]
            if authorization not in endpoint.earlier_authorizations or server not in endpoint.servers:
                continue
            if self._warned.get(server) != current:
                self._warned[server] = current
                logger.warning(
                    "%s, a server of the model %r, accepts only an earlier key than its Secret has now, so the gateway "
                    "sends that key; restart the server if it does not reload its key",
                    server,
                    endpoint.name,
                )

    def keep(self, servers: Iterable[str]) -> None:
        """These are all servers there are. One that left may come back soon, so what it takes is remembered a while."""
        current, now = set(servers), self._clock()
        for server in self._taken:
            if server in current:
                self._left_at.pop(server, None)
            else:
                self._left_at.setdefault(server, now)
        for forgotten in [server for server, left_at in self._left_at.items() if now - left_at > REMEMBERED_S]:
            del self._left_at[forgotten], self._taken[forgotten]
            self._warned.pop(forgotten, None)

    def alike(self, endpoint: Endpoint, servers: Sequence[str]) -> tuple[tuple[str, ...], str | None]:
        """Those of the servers that are told the same as the first, and what that is; None: nothing.

        A request is told one thing, whichever of its servers it reaches in the end.
        """
        authorization = self._for(endpoint, servers[0])
        alike = tuple(server for server in servers if self._for(endpoint, server) == authorization)
        return alike, authorization or None

    def _for(self, endpoint: Endpoint, server: str) -> str:
        """What a server is told: until it takes the current key, an earlier one that it takes."""
        known = endpoint.authorizations
        taken = self._taken.get(server, known[0])
        return taken if taken in known else known[0]
