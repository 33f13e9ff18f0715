"""Threads for what must not stand in line with the work, or hold it up: blocking calls, and requests to strangers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class OwnThread:
    """One thread; calls are made one after the other."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, name)

    async def call(self, function: Callable[[], T]) -> T:
        """What `function` returns or raises. Who stops waiting does not stop a call that has started."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, function)

    def close(self) -> None:
        """No more calls; those that have not started are dropped."""
        self._executor.shutdown(wait=False, cancel_futures=True)


class WorkerThreads:
    """A thread for each call, and so many calls at a time; one that takes longer than a bound no longer counts, so that
    calls that hang hold up no others.

    Args:
        name: what the threads are called.
        limit: how many calls are made at a time.
        seconds: the bound.
    """

    def __init__(self, name: str, limit: int, seconds: float) -> None:
        self._name, self._seconds = name, seconds
        self._slots = asyncio.Semaphore(limit)

    async def call(self, function: Callable[[], T], late: Callable[[], None]) -> T:
        """What `function` returns or raises, whenever that is. A caller that is cancelled does not stop it.

        Args:
            function: is called in a thread.
            late: is called once, in the event loop, when `function` has taken longer than the bound.
        """
        async with self._slots:
            result = self._start(function)
            done, _ = await asyncio.wait((result,), timeout=self._seconds)
        if not done:
            late()
        return await result

    def _start(self, function: Callable[[], T]) -> asyncio.Future[T]:
        result: Future[T] = Future()
        result.set_running_or_notify_cancel()  # from now on it cannot be cancelled

        def work() -> None:
            try:
                result.set_result(function())
            except BaseException as error:
                result.set_exception(error)

        # A daemon: the process can end while a call hangs.
        threading.Thread(target=work, name=self._name, daemon=True).start()
        wrapped = asyncio.wrap_future(result)
        # Where the caller was cancelled nobody asks for the error, and asyncio would log it as a bug.
        wrapped.add_done_callback(lambda done: done.cancelled() or done.exception())
        return wrapped


class BackgroundLoop:
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
