"""Waiting for what a cluster does in its own time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

#: Something hangs if it has not happened after so many seconds.
HANGING_S = 120.0


def wait_for(look: Callable[[], T | None], description: str, timeout: float, every: float = 1) -> T:
    """What `look` returns as soon as that is something.

    Raises:
        AssertionError: it was nothing for `timeout` seconds; `description` says what was waited for.
    """
    deadline = time.monotonic() + timeout
    while True:
        if found := look():
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout:.0f} s: {description}; last seen: {found!r}")
        time.sleep(every)


async def wait_for_async(holds: Callable[[], bool], description: str, timeout: float) -> None:  # noqa: ASYNC109
    """`wait_for` for coroutines: the event loop goes on meanwhile."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    while not holds():
        if loop.time() > deadline:
            raise AssertionError(f"not within {timeout:.0f} s: {description}")
        await asyncio.sleep(0.02)
