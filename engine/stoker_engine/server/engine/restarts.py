"""How a server outlives its engine: the engine is loaded again, in a new process, while the server goes on listening.

    serving ──the engine dies──► loading again ──loaded──► serving
    /ready 200                   /ready 503                /ready 200
                                 what has started to be answered has failed, at once;
                                 what has not, and new requests, wait

A server that ended with its engine would refuse connections until the last client has heard of it, which takes a
cluster seconds. An engine that keeps dying is not kept: beyond a number of deaths an hour the server ends with it, and
whoever started the server decides what is next. So it does where another process would fare no better: memory ran out,
or the engine was stuck, as may be what it runs on.

Engines of the model live and die by themselves. Where others serve, an engine is loaded again whatever it died of, so
many times an hour, and `BESIDE_OTHERS` times at least; beyond that it stays dead. An engine that may not be loaded
again by itself, as none serves, waits for one that may. The server ends with the last one.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from stoker_common.errors import EngineDeadError, EngineOutOfMemoryError, EngineStuckError

#: Seconds that a request waits for an engine that is loaded again: a little less than proxies wait for an answer.
PATIENCE_S: Final = 55.0

#: Deaths an hour after each of which an engine is loaded again, where others serve and no more are asked for.
BESIDE_OTHERS: Final = 3

_HOUR_S: Final = 3600.0


class Restarts:
    """The restarts of one engine. Used from the event loop only.

    Args:
        max_restarts: how many there may be in an hour.

    Attributes:
        given_up: there will be no more.
    """

    def __init__(self, max_restarts: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._max_restarts = max_restarts
        self._began: deque[float] = deque()
        self._under_way = asyncio.Event()
        self._over = asyncio.Event()
        self.given_up = False

    def allowed(self, death: EngineDeadError, others_serve: bool = False) -> bool:
        """Whether an engine that died so is to be loaded again.

        Args:
            others_serve: whether other engines of the model do.
        """
        while self._began and self._began[0] <= self._clock() - _HOUR_S:
            self._began.popleft()
        if others_serve:
            return len(self._began) < max(self._max_restarts, BESIDE_OTHERS)
        return len(self._began) < self._max_restarts and not isinstance(
            death, EngineOutOfMemoryError | EngineStuckError
        )

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """While the engine is loaded again. Where that fails another attempt follows, or `give_up`."""
        self.given_up = False
        self._began.append(self._clock())
        self._over.clear()
        self._under_way.set()
        yield
        self._under_way.clear()
        self._over.set()

    def give_up(self) -> None:
        """There will be no more; or else not until another engine serves."""
        self.given_up = True
        self._under_way.set()
        self._over.set()

    async def wait(self, is_ready: Callable[[], bool] = lambda: True) -> bool:
        """Waits for the end of the restart that is under way or about to be, and for that of the next where the engine
        is not ready by then; `PATIENCE_S` at most. To be called where the engine is dead, also if nobody has noticed
        yet: a process with much memory takes a while to be gone.

        Returns:
            Whether the engine is ready.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                while (self._max_restarts or self._under_way.is_set()) and not self.given_up:
                    await self._under_way.wait()
                    await self._over.wait()
                    if not self.given_up and is_ready():
                        return True
        return False


async def wait_any(restarts: Sequence[Restarts], is_ready: Callable[[], bool]) -> bool:
    """The same of several engines: the first that is ready again.

    Returns:
        Whether one is.
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
