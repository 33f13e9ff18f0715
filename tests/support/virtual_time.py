"""Virtual time: an event loop whose clock advances only while the loop waits.

Hours pass at once, and load on the machine changes nothing. Tests use it by the fixture `virtual_time`.
"""

from __future__ import annotations

import asyncio
import selectors
from typing import Any


class VirtualLoop(asyncio.SelectorEventLoop):
    """Event loop whose waits end at once, with the clock advanced."""

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
    """Return the virtual time in seconds; it starts at 0."""
    return _loop().now


async def elapse(seconds: float) -> None:
    """Let virtual seconds pass; whatever is due meanwhile runs.

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
