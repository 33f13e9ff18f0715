"""Threads for blocking calls and for requests to untrusted servers, which must not delay other work."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class OwnThread:
    """A thread that runs calls one after the other."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, name)

    async def call(self, function: Callable[[], T]) -> T:
        """Run `function` and return its result, or raise its exception. Cancellation does not stop a started call."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, function)

    def close(self) -> None:
        """Accept no more calls, and cancel those that have not started."""
        self._executor.shutdown(wait=False, cancel_futures=True)


class WorkerThreads:
    """Runs each call in a thread of its own, a limited number at a time.

    Late and cancelled calls are excluded from the limit, so that hanging calls cannot block others forever.

    Args:
        name: name of the threads.
        limit: maximum number of calls at a time.
        seconds: duration from which a call is late.
    """

    def __init__(self, name: str, limit: int, seconds: float) -> None:
        self._name, self._seconds = name, seconds
        self._slots = asyncio.Semaphore(limit)

    async def call(self, function: Callable[[], T], late: Callable[[], None]) -> T:
        """Run `function` and return its result, or raise its exception. Cancellation does not stop a started call.

        Args:
            function: called in a thread.
            late: called in the event loop if the call becomes late.
        """
        async with self._slots:
            result = self._start(function)
            done, _ = await asyncio.wait((result,), timeout=self._seconds)
        if not done:
            late()
        return await result

    def _start(self, function: Callable[[], T]) -> asyncio.Future[T]:
        result: Future[T] = Future()
        result.set_running_or_notify_cancel()  # from now on the call cannot be cancelled

        def work() -> None:
            try:
                result.set_result(function())
            except BaseException as error:
                result.set_exception(error)

        # A daemon thread, so that the process can end while a call hangs.
        threading.Thread(target=work, name=self._name, daemon=True).start()
        wrapped = asyncio.wrap_future(result)
        # If the caller was cancelled, no other code retrieves the exception, and asyncio would log that.
        wrapped.add_done_callback(lambda done: done.cancelled() or done.exception())
        return wrapped


class BackgroundLoop:
    """An event loop in a thread of its own, which starts with the first coroutine and ends with the process."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Schedule `work` without waiting for it."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name=self._name, daemon=True).start()
        asyncio.run_coroutine_threadsafe(work, self._loop)
