"""Sharing of limits with other replicas: limiter, message server, and discovery of the replicas."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Final, NoReturn

from stoker_gateway.limits.peer_limiter import PeerLimiter
from stoker_gateway.limits.peer_server import PeerServer
from stoker_gateway.limits.peer_settings import PeerSettings

logger = logging.getLogger(__name__)

#: Interval of lookups of the replicas' addresses, in seconds.
_LOOKUP_S: Final = 1.0


class Peers:
    """Limits shared with other replicas. Runs in one event loop."""

    def __init__(self, settings: PeerSettings) -> None:
        self._settings = settings
        #: Limiter for the requests of this replica's clients.
        self.limiter = PeerLimiter(settings.token)
        self._server = PeerServer(settings.token, self.limiter.receive)

    async def start(self) -> None:
        """Start to exchange messages with the other replicas.

        Raises:
            OSError: the address in the settings cannot be bound.
        """
        port = self._server.listen(self._settings.listen)
        await self._server.start()
        await self.limiter.set_peers(self._settings.addresses)
        addresses = ", ".join(self._settings.addresses) or "no replica yet"
        logger.info("the keys' limits are shared with %s; listening for other replicas on port %d", addresses, port)

    async def watch(self) -> NoReturn:
        """Resolve `PeerSettings.service` periodically, if it is set, and use its addresses. If it cannot be resolved,
        the previous addresses are kept."""
        while True:
            if self._settings.service is not None:
                try:
                    await self.limiter.set_peers(await _addresses(self._settings.service))
                except OSError as error:
                    logger.debug("%s cannot be resolved: %s", self._settings.service, error)
            await asyncio.sleep(_LOOKUP_S)

    async def stop(self) -> None:
        """Stop the limiter and the server."""
        await self.limiter.close()
        await self._server.stop()


async def _addresses(service: str) -> set[str]:
    """Return ``IP:PORT`` of all addresses of a name.

    Raises:
        OSError: the name cannot be resolved.
    """
    host, _, port = service.rpartition(":")
    found = await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    return {
        f"[{address[0]}]:{port}" if family == socket.AF_INET6 else f"{address[0]}:{port}"
        for family, _, _, _, address in found
    }
