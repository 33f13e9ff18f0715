"""Waiting for asynchronous changes of a cluster."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

#: Time after which a condition counts as hanging, in seconds.
HANGING_S = 120.0


def wait_for(look: Callable[[], T | None], description: str, timeout: float, every: float = 1) -> T:
    """Call `look` until it returns something other than None or false, and return that.

    Raises:
        AssertionError: `timeout` seconds passed; `description` says what was expected.
    """
    deadline = time.monotonic() + timeout
    while True:
        if found := look():
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout:.0f} s: {description}; last seen: {found!r}")
        time.sleep(every)


async def wait_for_async(holds: Callable[[], bool], description: str, timeout: float) -> None:  # noqa: ASYNC109
    """Wait in a coroutine, without blocking the event loop, until `holds` returns True."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    while not holds():
        if loop.time() > deadline:
            raise AssertionError(f"not within {timeout:.0f} s: {description}")
        await asyncio.sleep(0.02)
