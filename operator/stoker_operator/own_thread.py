"""A thread for blocking calls that must not stand in line behind the work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class OwnThread:
    """One thread; calls are made one after the other."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, name)

    async def call(self, function: Callable[[], T]) -> T:
        """What `function` returns or raises. Who stops waiting does not stop a call that has begun."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, function)

    def close(self) -> None:
        """No more calls; those that have not begun are dropped."""
        self._executor.shutdown(wait=False, cancel_futures=True)
