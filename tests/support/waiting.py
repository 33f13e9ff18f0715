"""How tests wait: for a condition, until it holds.

A timeout only ends a hanging test. It asserts no speed: it is long, and a passing test never reaches it.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

#: Time after which a condition counts as hanging, in seconds.
HANGING_S = 120.0
#: Polling interval in seconds.
_EVERY_S = 0.005


def until(
    condition: Callable[[], T],
    description: str | Callable[[], object] = "",
    timeout: float = HANGING_S,
    every: float = _EVERY_S,
) -> T:
    """Wait until a condition holds.

    Args:
        condition: holds as soon as it returns something true.
        description: the awaited condition, or a function that describes the current state, for the error.
        timeout: seconds after which the test hangs.
        every: polling interval in seconds, for expensive conditions.

    Returns:
        What the condition returned.

    Raises:
        AssertionError: the condition did not hold for `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while not (result := condition()):
        if time.monotonic() > deadline:
            raise _hangs(description, timeout, result)
        time.sleep(every)
    return result


async def until_async(
    condition: Callable[[], T | Awaitable[T]],
    description: str | Callable[[], object] = "",
    timeout: float = HANGING_S,  # noqa: ASYNC109 - the error says what was waited for
    every: float = _EVERY_S,
) -> T:
    """Wait until a condition holds, while the event loop keeps running: `until` for coroutines.

    The condition may be a coroutine function; `timeout` and `every` are seconds of the loop's clock. See `until`.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    while True:
        look = condition()
        result: T = await look if inspect.isawaitable(look) else look
        if result:
            return result
        if loop.time() > deadline:
            raise _hangs(description, timeout, result)
        await asyncio.sleep(every)


def _hangs(description: str | Callable[[], object], timeout: float, result: object) -> AssertionError:
    text = description() if callable(description) else description
    return AssertionError(f"not within {timeout:.0f} s: {text or 'a condition'}; last seen: {result!r}")
