"""A replica's limits among those of others: what decides, and where others are heard."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from stoker_gateway.limits.peer_limiter import PeerLimiter
from stoker_gateway.limits.peer_server import PeerServer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PeerSettings:
    """Who the other replicas are.

    Attributes:
        listen: where they reach this one, ``HOST:PORT``.
        token: that all replicas know.
        addresses: of the others, ``HOST:PORT``.
    """

    listen: str
    token: str = field(repr=False)
    addresses: tuple[str, ...] = ()


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
        others = ", ".join(self._settings.addresses) or "nobody yet"
        logger.info("limits are kept together with %s; other replicas are heard at port %d", others, port)

    async def stop(self) -> None:
        """Ends."""
        await self.limiter.close()
        await self._server.stop()
