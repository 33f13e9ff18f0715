"""Tracks which API key each server of an endpoint accepts after the endpoint's key was changed.

A server that reads its key only at start, such as vLLM's, accepts the key of that time until it is restarted. A server
that rereads its key file, such as Stoker's engine, accepts a new key some time after it was written.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from stoker_gateway.registry.model_registry import Endpoint

logger = logging.getLogger(__name__)

#: Seconds for which a removed server is remembered.
REMEMBERED_S: Final = 300.0


class ServerKeys:
    """The last ``Authorization`` that each server accepted.

    Args:
        clock: monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left_at: dict[str, float] = {}
        self._accepted: dict[str, str] = {}
        #: Server → current ``Authorization`` at the last warning that the server accepts only an earlier one.
        self._warned: dict[str, str] = {}

    def accepted(self, server: str, authorization: str, endpoints: Iterable[Endpoint] = ()) -> None:
        """Record that a server accepted this ``Authorization``; empty means that it accepted a request without one.

        Args:
            endpoints: all endpoints. If `authorization` is an earlier key of an endpoint with this server, a warning
                is logged, once for each current key.
        """
        self._accepted[server] = authorization
        for endpoint in endpoints:
            current = endpoint.authorizations[0]
            if authorization not in endpoint.earlier_authorizations or server not in endpoint.servers:
                continue
            if self._warned.get(server) != current:
                self._warned[server] = current
                logger.warning(
                    "%s, a server of the model %r, does not accept the current key of its Secret, but an earlier one, "
                    "which the gateway sends to it; restart the server if it does not reload its key",
                    server,
                    endpoint.name,
                )

    def keep(self, servers: Iterable[str]) -> None:
        """Set the current servers. Others are remembered for `REMEMBERED_S`, because they may come back soon."""
        current, now = set(servers), self._clock()
        for server in self._accepted:
            if server in current:
                self._left_at.pop(server, None)
            else:
                self._left_at.setdefault(server, now)
        for forgotten in [server for server, left_at in self._left_at.items() if now - left_at > REMEMBERED_S]:
            del self._left_at[forgotten], self._accepted[forgotten]
            self._warned.pop(forgotten, None)

    def alike(self, endpoint: Endpoint, servers: Sequence[str]) -> tuple[tuple[str, ...], str | None]:
        """Return the servers that get the same ``Authorization`` as the first one, and that value; None means no
        ``Authorization``.

        A request carries the same value to each of its servers, also in a retry.
        """
        authorization = self._for(endpoint, servers[0])
        alike = tuple(server for server in servers if self._for(endpoint, server) == authorization)
        return alike, authorization or None

    def _for(self, endpoint: Endpoint, server: str) -> str:
        """Return a server's ``Authorization``: the one that it accepted last if it is one of the endpoint's, else the
        current one."""
        known = endpoint.authorizations
        accepted = self._accepted.get(server, known[0])
        return accepted if accepted in known else known[0]
