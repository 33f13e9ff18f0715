"""The one queue between the thread that reads the engine's pipe and the coroutine that writes an answer.

    reading thread ── put ──► OutputStream ── take ──► coroutine
           └── once a step: event loop ── wake ──┘

A reader that keeps up gets each step's deltas as they are. For one that does not, the deltas of a sequence are merged
into one, which holds all that its parts held: what a stream keeps in the server is no more than its text, and the
log-probabilities that were asked for, and it is written in as few events as its client can take. vLLM's
`RequestOutputCollector` does the same.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

from stoker_common.errors import RequestFailedError
from stoker_engine.core.finish_reason import FinishReason
from stoker_engine.core.outputs import OutputDelta


class OutputStream:
    """What one or several requests generate, for one reader. Any thread may `put`; all else is the event loop's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: dict[tuple[str, int], OutputDelta | _Merged] = {}
        self._error: Exception | None = None
        self._before_error: dict[tuple[str, int], OutputDelta | _Merged] = {}
        self._waiter: asyncio.Future[None] | None = None

    def put(self, delta: OutputDelta) -> bool:
        """Adds a delta. One with `FinishReason.ERROR` is raised by `take`, after what came before it, and before what
        comes after it: that may be of other requests, which go on.

        Returns:
            Whether the stream was empty: its reader may be waiting, and `wake` must be called in the event loop.
        """
        key = delta.request_id, delta.index
        with self._lock:
            was_empty = not self._pending
            waiting = self._pending.get(key)
            if delta.finish_reason is FinishReason.ERROR:
                self._fail(RequestFailedError(delta.error))
            elif waiting is None:
                self._pending[key] = delta
            elif isinstance(waiting, _Merged):
                waiting.add(delta)
            else:
                self._pending[key] = _Merged(waiting, delta)
        return was_empty

    def wake(self) -> None:
        """Wakes the reader, if it waits."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def fail(self, error: Exception) -> None:
        """Has `take` raise `error` once, after what came before it. Of several errors the first counts."""
        with self._lock:
            self._fail(error)
        self.wake()

    async def get(self) -> list[OutputDelta]:
        """Waits for deltas, and returns all there are, at most one of each sequence.

        Raises:
            RequestFailedError: the engine failed at one of the requests.
            Exception: what `fail` was given.
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
            await self._waiter  # what was put since the look above has its `wake` still to come

    def _fail(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
            self._before_error, self._pending = self._pending, {}


class _Merged:
    """Deltas of one sequence that become one. Each costs the same, however many there are."""

    def __init__(self, first: OutputDelta, second: OutputDelta) -> None:
        self._texts = [first.text]
        self._token_ids = [*first.token_ids]
        self._logprobs = None if first.logprobs is None else [*first.logprobs]
        self._prompt_logprobs = first.prompt_logprobs
        self.add(second)

    def add(self, delta: OutputDelta) -> None:
        """Takes in the sequence's next delta."""
        self._texts.append(delta.text)
        self._token_ids += delta.token_ids
        if self._logprobs is not None:
            self._logprobs += delta.logprobs or ()
        self._last = delta

    def delta(self) -> OutputDelta:
        """All of them as one: the last one's fields, and what each of them added."""
        return replace(
            self._last,
            text="".join(self._texts),
            token_ids=self._token_ids,
            logprobs=self._logprobs,
            prompt_logprobs=self._prompt_logprobs,
        )
