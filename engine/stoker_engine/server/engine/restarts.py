"""Restarts of engines: a dead engine is loaded again in a new process, while the server keeps listening.

    serving ──the engine dies──► loading again ──loaded──► serving
    /ready 200                   /ready 503                /ready 200
                                 requests whose answer has started fail immediately;
                                 others, and new ones, wait

If the server ended with its engine, connections would be refused until all clients had noticed, which takes
seconds in a cluster. After the allowed number of restarts per hour the server ends with its engine, and its supervisor
decides what to do. The server also ends if a new process would not help: if memory ran out, or the engine was stuck,
perhaps because of its hardware.

Data-parallel engines fail and restart independently. While others serve, an engine is restarted whatever the cause of
its death, up to the allowed number of times per hour or `BESIDE_OTHERS` times, if that is more; after that it stays
dead. If no other engine serves, an engine that has died too often waits until another engine is restarted. The server
ends if no such restart is possible, or if memory ran out or the engine was stuck.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from stoker_common.errors import EngineDeadError, EngineOutOfMemoryError, EngineStuckError

#: Maximum seconds for which a request waits for a restarting engine: a little less than common proxy timeouts.
PATIENCE_S: Final = 55.0

#: Number of restarts per hour that are allowed while other engines serve, even if `max_restarts` is smaller.
BESIDE_OTHERS: Final = 3

_HOUR_S: Final = 3600.0


class Restarts:
    """The restarts of one engine. Used from the event loop only.

    Args:
        max_restarts: maximum number of restarts per hour; at least `BESIDE_OTHERS` are allowed while another engine
            serves. None: all are allowed, because another process restarts the engine or ends the server.

    Attributes:
        given_up: whether no further restart follows, at least until another engine serves.
    """

    def __init__(self, max_restarts: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._max_restarts = max_restarts
        self._began: deque[float] = deque()
        self._under_way = asyncio.Event()
        self._over = asyncio.Event()
        self.given_up = False

    def allowed(self, death: EngineDeadError, others_serve: bool = False) -> bool:
        """Return whether an engine that died of `death` may be restarted."""
        if self._max_restarts is None:
            return True
        while self._began and self._began[0] <= self._clock() - _HOUR_S:
            self._began.popleft()
        if others_serve:
            return len(self._began) < max(self._max_restarts, BESIDE_OTHERS)
        return len(self._began) < self._max_restarts and not isinstance(
            death, EngineOutOfMemoryError | EngineStuckError
        )

    @property
    def are_by_another_process(self) -> bool:
        """Whether another process restarts the engine."""
        return self._max_restarts is None

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """Context of one restart. If the context raises, another restart or `give_up` must follow."""
        self.given_up = False
        if self._max_restarts is not None:
            self._began.append(self._clock())
        self._over.clear()
        self._under_way.set()
        yield
        self._under_way.clear()
        self._over.set()

    def on_later_load(self) -> None:
        """Let requests check whether the engine is ready, because it has been loaded without a restart."""
        self._under_way.set()
        self._under_way.clear()
        self._over.set()

    def give_up(self) -> None:
        """Record that no restart follows, at least until another engine serves."""
        self.given_up = True
        self._under_way.set()
        self._over.set()

    async def wait(self, is_ready: Callable[[], bool] = lambda: True) -> bool:
        """Wait for a current or imminent restart, and for further ones until the engine is ready or given up.

        Waits at most `PATIENCE_S`. Called when the engine is dead, even if its death is not yet detected: a process
        with much memory takes a while to exit.

        Returns:
            Whether the engine is ready.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                while (self._max_restarts != 0 or self._under_way.is_set()) and not self.given_up:
                    await self._under_way.wait()
                    await self._over.wait()
                    if not self.given_up and is_ready():
                        return True
        return False


async def wait_any(restarts: Sequence[Restarts], is_ready: Callable[[], bool]) -> bool:
    """Wait until any of several engines is ready again, or none can be; see `Restarts.wait`.

    Returns:
        Whether an engine is ready.
    """
    waiting = {asyncio.ensure_future(each.wait(is_ready)) for each in restarts}
    try:
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if any(each.result() for each in done):
                return True
        return is_ready()
    finally:
        for each in waiting:
            each.cancel()
