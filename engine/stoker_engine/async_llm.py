"""The engine behind an event loop: one thread steps it, coroutines add requests and await their tokens.

Requests and aborts travel to the thread through a queue that it empties between steps, so the engine itself is
only ever touched by its own thread. Without work the thread sleeps on that queue: idle costs nothing.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Callable

from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.contract.errors import EngineDeadError
from stoker_engine.core.observer import Observer
from stoker_engine.core.outputs import OutputDelta
from stoker_engine.core.request import Request
from stoker_engine.core.sampling_params import SamplingParams
from stoker_engine.engine import Engine
from stoker_engine.tokens.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_Item = OutputDelta | EngineDeadError
_Put = Callable[[_Item], None]

_DEAD = "the engine has stopped; see the server's log"


class AsyncLLM:
    """An engine in its own thread.

    Attributes:
        failed: set once the loop has died of an error; it never comes back.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.failed = threading.Event()
        self._inbox: queue.SimpleQueue[tuple[Request, _Put] | str | None] = queue.SimpleQueue()
        self._streams: dict[str, _Put] = {}  # owned by the thread
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @classmethod
    def from_args(
        cls, args: EngineArgs, chat_template: str | None = None, observer: Observer | None = None
    ) -> AsyncLLM:
        """Loads the model; see `Engine.from_args`."""
        return cls(Engine.from_args(args, chat_template, observer))

    @property
    def args(self) -> EngineArgs:
        """The engine's arguments."""
        return self.engine.args

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; usable from any thread."""
        return self.engine.tokenizer

    @property
    def max_model_len(self) -> int:
        """Longest sequence, prompt and output."""
        return self.engine.max_model_len

    @property
    def is_healthy(self) -> bool:
        """Whether the loop runs."""
        return self._thread.is_alive() and not self.failed.is_set()

    def start(self) -> None:
        """Starts the loop."""
        self._thread.start()

    def shutdown(self) -> None:
        """Stops the loop after its current step; requests in flight end with `EngineDeadError`."""
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join()

    async def generate(
        self, request_id: str, prompt_token_ids: list[int], params: SamplingParams
    ) -> AsyncGenerator[OutputDelta, None]:
        """Yields what each step adds to the request, until the delta with a finish reason.

        Closing or cancelling the generator aborts the request and frees its blocks.

        Raises:
            RequestError: the request is invalid; raised before the first delta.
            EngineDeadError: the loop died or was shut down.
        """
        request = self.engine.request(request_id, prompt_token_ids, params)
        if not self.is_healthy:
            raise EngineDeadError(_DEAD)
        loop = asyncio.get_running_loop()
        stream: asyncio.Queue[_Item] = asyncio.Queue()

        def put(item: _Item) -> None:
            try:
                loop.call_soon_threadsafe(stream.put_nowait, item)
            except RuntimeError:  # the event loop is closed, nobody is listening
                logger.debug("request %s has no listener any more", request_id)

        self._inbox.put((request, put))
        if self.failed.is_set():  # it died just now, and nobody empties the inbox any more
            raise EngineDeadError(_DEAD)
        finished = False
        try:
            while not finished:
                item = await stream.get()
                if isinstance(item, EngineDeadError):
                    finished = True
                    raise item
                finished = item.finish_reason is not None
                yield item
        finally:
            if not finished:
                self._inbox.put(request_id)

    def _run(self) -> None:
        try:
            while self._take():
                for delta in self.engine.step():
                    put = self._streams[delta.request_id]
                    if delta.finish_reason is not None:
                        del self._streams[delta.request_id]
                    put(delta)
        except Exception:
            logger.exception("the engine's loop died")
            self.failed.set()
        finally:
            self._end_streams()

    def _take(self) -> bool:
        """Empties the inbox, sleeping on it while there is no work. False: shut down."""
        while True:
            try:
                item = self._inbox.get(block=not self.engine.has_work)
            except queue.Empty:
                return True
            if item is None:
                return False
            if isinstance(item, str):
                self._streams.pop(item, None)
                self.engine.abort(item)
                if not self.engine.has_work:
                    self.engine.settle()
            else:
                request, put = item
                self._streams[request.id] = put
                self.engine.add(request)

    def _end_streams(self) -> None:
        """Nobody waits for a loop that is gone: neither those in flight nor those still in the inbox."""
        self.failed.set()
        error = EngineDeadError(_DEAD)
        for put in self._streams.values():
            put(error)
        while not self._inbox.empty():
            item = self._inbox.get()
            if isinstance(item, tuple):
                item[1](error)
