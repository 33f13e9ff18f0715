"""Which of an endpoint's keys each of its servers takes: one that reads its key when it starts, as vLLM's, takes the
key of that time until it is restarted, and one that reads it from a file takes a new one some time after it is written.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from stoker_gateway.directory import Endpoint

logger = logging.getLogger(__name__)


class ServerKeys:
    """By server, the last ``Authorization`` that it answered to."""

    def __init__(self) -> None:
        self._taken: dict[str, str] = {}
        #: By server, the key in force when a warning said that it wants an earlier one.
        self._warned: dict[str, str | None] = {}

    def takes(self, server: str, authorization: str, endpoints: Iterable[Endpoint] = ()) -> None:
        """A server, of these endpoints or of none of them, has answered to this."""
        self._taken[server] = authorization
        for endpoint in endpoints:
            current = endpoint.authorization
            if server not in endpoint.servers or authorization not in endpoint.earlier_authorizations:
                continue
            if self._warned.get(server) != current:
                self._warned[server] = current
                logger.warning(
                    "%s, a server of the model %r, wants an earlier key than its Secret has now, and gets it; "
                    "restart the server if it does not read the key again by itself",
                    server,
                    endpoint.name,
                )

    def keep(self, servers: Iterable[str]) -> None:
        """These are all servers there are."""
        for gone in self._taken.keys() - set(servers):
            del self._taken[gone]
            self._warned.pop(gone, None)

    def alike(self, endpoint: Endpoint, servers: Sequence[str]) -> tuple[tuple[str, ...], str | None]:
        """Those of the servers that are told the same as the first, and what that is; None: nothing.

        A request is told one thing, whichever of its servers it reaches in the end.
        """
        authorization = self._for(endpoint, servers[0])
        return tuple(server for server in servers if self._for(endpoint, server) == authorization), authorization

    def _for(self, endpoint: Endpoint, server: str) -> str | None:
        """What a server is told: until it takes the current key, an earlier one that it takes."""
        taken = self._taken.get(server)
        return taken if taken in endpoint.authorizations else endpoint.authorization
