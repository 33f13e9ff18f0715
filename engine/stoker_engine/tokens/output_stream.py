"""The queue between the thread that reads the engine's pipe and the coroutine that writes a response.

    reading thread ── put ──► OutputStream ── get ──► coroutine
           └── once a step: event loop ── wake ──┘

A reader that keeps up receives each step's deltas unchanged. For a slower reader, pending deltas of a sequence are
merged into one without loss. A stream's memory is therefore bounded by its text and requested logprobs, and a slow
client receives fewer, larger events. vLLM's `RequestOutputCollector` does the same.

With an interval, deltas are also merged for a reader that keeps up: after a sequence's first delta, the reader is woken
for every `interval` tokens of it, and for its end.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

from stoker_common.errors import RequestFailedError
from stoker_engine.core.finish_reason import FinishReason
from stoker_engine.core.outputs import OutputDelta


class OutputStream:
    """The outputs of one or several requests, for one reader. Any thread may call `put`; all other methods belong to
    the event loop.

    Args:
        interval: minimum number of tokens of a sequence's deltas, except the first, the last and those before an error;
            None: only these exceptions are returned.
    """

    def __init__(self, interval: int | None = 1) -> None:
        self._lock = threading.Lock()
        self._interval = interval
        self._started: set[tuple[str, int]] = set()  # sequences with a delta, if they have an interval
        self._held: dict[tuple[str, int], OutputDelta | _Merged] = {}  # fewer tokens than the interval
        self._pending: dict[tuple[str, int], OutputDelta | _Merged] = {}
        self._error: Exception | None = None
        self._before_error: dict[tuple[str, int], OutputDelta | _Merged] = {}
        self._waiter: asyncio.Future[None] | None = None

    def put(self, delta: OutputDelta) -> bool:
        """Add a delta. A delta with `FinishReason.ERROR` makes `get` raise an error, after the deltas before it and
        before later ones, which may belong to other requests that continue.

        Returns:
            Whether the reader may be waiting for this delta, so that `wake` must be called in the event loop.
        """
        key = delta.request_id, delta.index
        with self._lock:
            if delta.finish_reason is FinishReason.ERROR:
                self._fail(RequestFailedError(delta.error))
                return True
            was_empty = not self._pending
            if key in self._pending:
                self._pending[key] = _merged(self._pending[key], delta)
                return False
            if self._interval == 1:
                self._pending[key] = delta
                return was_empty
            held = self._held.pop(key, None)
            waiting = delta if held is None else _merged(held, delta)
            if key in self._started and delta.finish_reason is None and not self._is_enough(waiting):
                self._held[key] = waiting
                return False
            self._started.add(key)
            self._pending[key] = waiting
        return was_empty

    def wake(self) -> None:
        """Wake the reader, if it waits."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def fail(self, error: Exception) -> None:
        """Make `get` raise `error` once, after the deltas before it. Of several pending errors the first is raised."""
        with self._lock:
            self._fail(error)
        self.wake()

    async def get(self) -> list[OutputDelta]:
        """Wait for deltas and return all pending ones, at most one per sequence.

        Raises:
            RequestFailedError: the engine failed at one of the requests.
            Exception: the argument of `fail`.
        """
        while True:
            with self._lock:
                if self._error is None:
                    deltas, self._pending = self._pending, {}
                elif self._before_error:
                    deltas, self._before_error = self._before_error, {}
                else:
                    error, self._error = self._error, None
                    raise error
            if deltas:
                return [each.delta() if isinstance(each, _Merged) else each for each in deltas.values()]
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter  # for deltas put since the check above, `wake` has yet to be called

    def _is_enough(self, waiting: OutputDelta | _Merged) -> bool:
        return self._interval is not None and len(waiting.token_ids) >= self._interval

    def _fail(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
            self._before_error, self._pending, self._held = self._pending | self._held, {}, {}


class _Merged:
    """Merges deltas of one sequence, at constant cost per delta."""

    def __init__(self, first: OutputDelta, second: OutputDelta) -> None:
        self._texts = [first.text]
        self.token_ids = [*first.token_ids]
        self._logprobs = None if first.logprobs is None else [*first.logprobs]
        self._prompt_logprobs = first.prompt_logprobs
        self.add(second)

    def add(self, delta: OutputDelta) -> None:
        """Add the sequence's next delta."""
        self._texts.append(delta.text)
        self.token_ids += delta.token_ids
        if self._logprobs is not None:
            self._logprobs += delta.logprobs or ()
        self._last = delta

    def delta(self) -> OutputDelta:
        """Return the merged delta: the last delta's fields, and the text, tokens and logprobs of all deltas."""
        return replace(
            self._last,
            text="".join(self._texts),
            token_ids=self.token_ids,
            logprobs=self._logprobs,
            prompt_logprobs=self._prompt_logprobs,
        )


def _merged(waiting: OutputDelta | _Merged, delta: OutputDelta) -> _Merged:
    if isinstance(waiting, _Merged):
        waiting.add(delta)
        return waiting
    return _Merged(waiting, delta)
