"""Threads for what must not stand in line with the work, or hold it up: blocking calls, and requests to strangers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

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


class OwnLoop:
    """An event loop in a thread of its own, which begins with the first work and ends with the process."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Has `work` done; does not wait."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name=self._name, daemon=True).start()
        asyncio.run_coroutine_threadsafe(work, self._loop)
