"""A replica's limits among those of others: what decides, and where others are heard."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Final, NoReturn

from stoker_gateway.limits.peer_limiter import PeerLimiter
from stoker_gateway.limits.peer_server import PeerServer
from stoker_gateway.limits.peer_settings import PeerSettings

logger = logging.getLogger(__name__)

#: Seconds between lookups of the others' addresses.
_LOOK_UP_S: Final = 1.0


class Peers:
    """Limits that are kept together with other replicas. Lives in one event loop."""

    def __init__(self, settings: PeerSettings) -> None:
        self._settings = settings
        #: What decides.
        self.limiter = PeerLimiter(settings.token)
        self._server = PeerServer(settings.token, self.limiter.hear)

    async def start(self) -> None:
        """Begins to speak with the others.

        Raises:
            OSError: it cannot be listened where the settings say.
        """
        port = self._server.listen(self._settings.listen)
        await self._server.start()
        await self.limiter.set_peers(self._settings.addresses)
        addresses = ", ".join(self._settings.addresses) or "no replica yet"
        logger.info("the keys' limits are shared with %s; listening for other replicas on port %d", addresses, port)

    async def watch(self) -> NoReturn:
        """Looks up who the others are, again and again. One that no name stands for is gone; where names are not
        answered for, all stay who were there."""
        while True:
            if self._settings.service is not None:
                try:
                    await self.limiter.set_peers(await _addresses(self._settings.service))
                except OSError as error:
                    logger.debug("%s cannot be resolved: %s", self._settings.service, error)
            await asyncio.sleep(_LOOK_UP_S)

    async def stop(self) -> None:
        """Ends."""
        await self.limiter.close()
        await self._server.stop()


async def _addresses(service: str) -> set[str]:
    """``IP:PORT`` of all that a name stands for.

    Raises:
        OSError: nobody knows the name, or answers for names.
    """
    host, _, port = service.rpartition(":")
    found = await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    return {
        f"[{address[0]}]:{port}" if family == socket.AF_INET6 else f"{address[0]}:{port}"
        for family, _, _, _, address in found
    }
