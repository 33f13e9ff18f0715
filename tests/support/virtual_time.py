"""Virtual time: an event loop whose clock moves only while the loop waits, so that hours pass at once and load on the
machine changes nothing. Tests run coroutines in it by the fixture `virtual_time`."""

from __future__ import annotations

import asyncio
import selectors
from typing import Any


class VirtualLoop(asyncio.SelectorEventLoop):
    """Where nothing is left to do but wait, the wait is over at once, and the clock has moved."""

    def __init__(self) -> None:
        self.now = 0.0
        selector = selectors.DefaultSelector()
        select = selector.select

        def skip(timeout: float | None = None) -> Any:
            self.now += timeout or 0
            return select(0)

        selector.select = skip  # type: ignore[method-assign]
        super().__init__(selector)

    def time(self) -> float:
        return self.now


def now() -> float:
    """The virtual clock, in seconds; it begins at 0."""
    return _loop().now


async def elapse(seconds: float) -> None:
    """Let so many virtual seconds pass; what is due meanwhile happens.

    Raises:
        TypeError: the running loop has real time.
    """
    _loop()
    await asyncio.sleep(seconds)


def _loop() -> VirtualLoop:
    loop = asyncio.get_running_loop()
    if not isinstance(loop, VirtualLoop):
        raise TypeError("this loop has real time: wait for a condition (tests/support/waiting.py)")
    return loop
