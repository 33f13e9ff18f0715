"""Stages of the server's shutdown.

    serving ──SIGTERM──► leaving ──grace over──► closed ──all answered, or out of time──► the process ends
    /ready 200           /ready 503              /ready 503
                         requests are served,    new requests get 503;
                         connections closed      those in flight finish

The grace period covers the seconds that a cluster takes to remove a pod from its endpoints. A request in this period
shows that the pod has not been removed yet, so it restarts the period, within a limit.
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
        leaving: whether the server has been asked to stop.
        closed: whether the server refuses new requests.
        in_flight: number of requests being answered, except for `OPEN_PATHS`.
        last_came: arrival of the newest such request, finished or not, in event loop time; -inf before the first.
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
