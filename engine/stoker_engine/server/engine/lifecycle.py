"""Stages of the server's shutdown. No request is lost while clients still use the server's address.

    serving ──SIGTERM──► leaving ──grace over──► closed ──all answered, or out of time──► the process ends
    /ready 200           /ready 503              /ready 503
                         requests are served,    new requests get 503;
                         connections closed      those in flight finish

A cluster takes some seconds to remove a pod from its endpoints; until then new requests arrive and are served. A
request late in the grace period shows that the pod is not removed yet, so it restarts the grace period.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field

from stoker_engine.server.unavailable import NotStartedError


@dataclass
class Lifecycle:
    """Stage of the shutdown. Used from the event loop only.

    Attributes:
        leaving: the server has been asked to stop.
        closed: it accepts no new requests.
        in_flight: number of requests being answered, except probes.
        last_came: event loop time at which the newest request arrived.
    """

    leaving: bool = False
    closed: bool = False
    in_flight: int = 0
    last_came: float = -math.inf
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    def check_open(self) -> None:
        """Refuse a request if the server is closed.

        Raises:
            NotStartedError: the server is closed.
        """
        if self.closed:
            raise NotStartedError("the server is stopping; retry, and another server may answer")

    def enter(self) -> None:
        """Record the arrival of a request."""
        self.in_flight += 1
        self.last_came = asyncio.get_running_loop().time()
        self._idle.clear()

    def leave(self) -> None:
        """Record the end of a request."""
        self.in_flight -= 1
        if self.in_flight == 0:
            self._idle.set()

    async def wait_idle(self) -> None:
        """Wait until no request is in flight."""
        if self.in_flight:
            await self._idle.wait()
