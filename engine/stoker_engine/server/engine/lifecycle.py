"""How the server stops, so that no request is lost while its address is still handed out.

    serving ──SIGTERM──► leaving ──grace over──► closed ──all answered, or out of time──► the process ends
    /ready 200           /ready 503              /ready 503
                         requests are served,    new requests get 503;
                         connections closed      those in flight finish

A cluster needs some seconds to learn that a pod is leaving; until then new requests keep coming, and are served. One
that comes late shows that the cluster has not heard yet, so the grace starts again with it.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field

from stoker_engine.server.unavailable import NotStartedError


@dataclass
class Lifecycle:
    """Where the server is on that way. Used from the event loop only.

    Attributes:
        leaving: it has been asked to stop.
        closed: it takes no new requests.
        in_flight: requests being answered, probes not counted.
        last_came: when the newest of them came, by the event loop's clock.
    """

    leaving: bool = False
    closed: bool = False
    in_flight: int = 0
    last_came: float = -math.inf
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    def check_open(self) -> None:
        """Raises:
        NotStartedError: the server is closed.
        """
        if self.closed:
            raise NotStartedError("the server is stopping; try again, another one may answer")

    def enter(self) -> None:
        """A request has come."""
        self.in_flight += 1
        self.last_came = asyncio.get_running_loop().time()
        self._idle.clear()

    def leave(self) -> None:
        """It is answered."""
        self.in_flight -= 1
        if self.in_flight == 0:
            self._idle.set()

    async def wait_idle(self) -> None:
        """Waits until nothing is in flight."""
        if self.in_flight:
            await self._idle.wait()
