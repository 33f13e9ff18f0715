"""How a server outlives its engine: the engine is loaded again, in a new process, while the server goes on listening.

    serving ──the engine dies──► loading again ──loaded──► serving
    /ready 200                   /ready 503                /ready 200
                                 what has begun to be answered has failed, at once;
                                 what has not, and new requests, wait

A server that ended with its engine would refuse connections until the last client has heard of it, which takes a
cluster seconds. An engine that keeps dying is not kept: beyond a number of deaths an hour the server ends with it, and
whoever started the server decides what is next. So it does where another process would fare no better: memory ran out,
or the engine was stuck, as may be what it runs on.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

from stoker_engine.contract.errors import EngineDeadError, EngineOutOfMemoryError, EngineStuckError

#: Seconds that a request waits for an engine that is loaded again: a little less than proxies wait for an answer.
PATIENCE_S: Final = 55.0

_HOUR_S: Final = 3600.0


class Restarts:
    """The engine's restarts. Used from the event loop only.

    Args:
        most: how many there may be in an hour.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._most = most
        self._began: deque[float] = deque()
        self._begun = asyncio.Event()
        self._over = asyncio.Event()
        self._given_up = False

    def allowed(self, death: EngineDeadError) -> bool:
        """Whether an engine that died so is to be loaded again."""
        while self._began and self._began[0] <= self._clock() - _HOUR_S:
            self._began.popleft()
        return len(self._began) < self._most and not isinstance(death, EngineOutOfMemoryError | EngineStuckError)

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """While the engine is loaded again. Where that fails another attempt follows, or `give_up`."""
        self._began.append(self._clock())
        self._over.clear()
        self._begun.set()
        yield
        self._begun.clear()
        self._over.set()

    def give_up(self) -> None:
        """There will be no more."""
        self._given_up = True
        self._begun.set()
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
                while self._most and not self._given_up:
                    await self._begun.wait()
                    await self._over.wait()
                    if not self._given_up and is_ready():
                        return True
        return False
