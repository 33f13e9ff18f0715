"""The engine behind an event loop: coroutines make requests and await their deltas, a process of its own computes.

    generate ─► InputProcessor ─► engine process ─► reading thread: text ─► event loop: one wake-up a step ─► streams

The engine's process starts when the client is made; `load` then finds the model's files, hands them over, and loads
the tokenizer meanwhile. Nothing here imports torch.

Whether the engine lives is looked up when somebody asks, from what cannot lie: the process's state, and since when it
is at its current step. While somebody waits for it, a watchdog looks too, and kills an engine that is stopped or
stuck: its requests end with an error then, instead of never. Without requests nobody looks and nothing runs.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from stoker_engine.children.load_failed import LoadFailed
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.contract.errors import EngineDeadError, EngineStuckError, RequestError, RequestFailedError
from stoker_engine.core.engine_info import EngineInfo
from stoker_engine.core.finish_reason import FinishReason
from stoker_engine.core.outputs import OutputDelta, StepOutputs
from stoker_engine.core.sampling_params import RequestParams
from stoker_engine.core.step_report import StepReport
from stoker_engine.models.locate import locate_model, locate_tokenizer
from stoker_engine.processes.engine_process import PROGRAM, EngineProcess
from stoker_engine.processes.messages import Abort, Stop
from stoker_engine.processes.status_word import PHASE_WORDS
from stoker_engine.tokens.bad_words import TokenSequence, sequences, spellings
from stoker_engine.tokens.input_processor import InputProcessor
from stoker_engine.tokens.output_processor import OutputProcessor
from stoker_engine.tokens.tokenizer import read_chat_template
from stoker_engine.tokens.tokenizer_process import TokenizerProcess

logger = logging.getLogger(__name__)

#: Seconds for which an engine may be stopped while somebody waits for it.
STOPPED_TIMEOUT_S: Final = 3.0

#: Seconds for which this side may be at one message of the engine.
HANDLING_TIMEOUT_S: Final = 300.0

#: Seconds that a killed engine may take to be gone.
_KILL_TIMEOUT_S: Final = 15.0

_WATCH_INTERVAL_S: Final = 0.5

#: How many requests' bad words are kept as tokens.
_KEPT_BAD_WORDS: Final = 64

_DEAD = "the engine has stopped; see the server's log"

_Item = OutputDelta | EngineDeadError
_T = TypeVar("_T")


class AsyncLLM:
    """An engine in its own process, for one event loop. Used by the server, through its `EngineClient` protocol.

    Args:
        chat_template: a Jinja template or its file, instead of the model's.
        step_timeout: seconds after which a step, or a phase of loading that does not progress, counts as stuck.
        log_format: of the engine process's log; see `logs.configure`.
        program: what runs in the process; tests bring their own.

    Raises:
        ArgumentError: the chat template's file cannot be read.

    Attributes:
        observer: called in the event loop with what each step did.
        args: the engine's arguments.
    """

    def __init__(
        self,
        args: EngineArgs,
        *,
        chat_template: str | None = None,
        step_timeout: float = 300.0,
        log_format: str = "text",
        program: Sequence[str] = PROGRAM,
    ) -> None:
        read_chat_template(chat_template)  # a wrong name is told now, not once the model is loaded
        self.args = args
        self.observer: Callable[[StepReport], None] | None = None
        self._chat_template = chat_template
        self._log_format = log_format
        self._step_timeout = step_timeout
        self._start = partial(EngineProcess, log_format, program)
        self._process = self._start()
        self._serving = False
        self._path: Path | None = None
        self._info: EngineInfo | None = None
        self._tokenizer: TokenizerProcess | None = None
        self._tokenizer_load: asyncio.Task[TokenizerProcess] | None = None
        self._bad_words: OrderedDict[tuple[str, ...], asyncio.Task[tuple[TokenSequence, ...]]] = OrderedDict()
        self._inputs: InputProcessor | None = None
        self._outputs: OutputProcessor | None = None
        self._dead_of: EngineDeadError | None = None
        self._closed = False
        self._streams: dict[str, asyncio.Queue[_Item]] = {}
        self._watchdog: asyncio.Task[None] | None = None

    async def load(self) -> EngineInfo:
        """Waits until the engine is loaded. Call once; and again, for another engine, when it is dead.

        Raises:
            ArgumentError, ModelError: it cannot be loaded. The client is shut down then.
            EngineDeadError: it died while it loaded.
        """
        if self._dead_of is not None:
            self._process.close()
            try:
                self._process = self._start()
            except OSError as error:
                raise EngineDeadError(f"its process cannot be started: {error.strerror}") from error
            self._dead_of = None
        self._loop = asyncio.get_running_loop()
        self._loaded: asyncio.Future[EngineInfo] = self._loop.create_future()
        self._death: asyncio.Future[EngineDeadError] = self._loop.create_future()
        process = self._process
        process.listen(partial(self._receive, process), partial(self._call, self._die, process))
        self._watch()
        try:
            path = self._path = self._path or await self._locate()  # another engine has the same weights
            process.send(dataclasses.replace(self.args, model=str(path), revision=None))
            if self._tokenizer_load is None:  # the next engine has the same tokenizer
                self._tokenizer_load = asyncio.create_task(self._load_tokenizer(path))
            info, tokenizer = await asyncio.gather(self._loaded, asyncio.shield(self._tokenizer_load))
        except EngineDeadError:
            raise
        except BaseException:
            self.shutdown()
            raise
        self._inputs = InputProcessor(info, None)
        self._outputs = OutputProcessor(tokenizer.vocabulary)
        self._info = info
        self._serving = True
        return info

    @property
    def info(self) -> EngineInfo:
        """Facts of the engine, once it is loaded."""
        assert self._info is not None, "the engine is not loaded yet"
        return self._info

    @property
    def tokenizer(self) -> TokenizerProcess:
        """The model's tokenizer, once it is loaded."""
        assert self._tokenizer is not None, "the engine is not loaded yet"
        return self._tokenizer

    @property
    def is_live(self) -> bool:
        """Whether the engine's process runs, and neither a step nor a phase of loading takes too long."""
        return self._dead_of is None and not self._closed and self._process.is_running and self._standstill() is None

    @property
    def is_stuck(self) -> bool:
        """Whether its process is there, but stopped, or with a step that takes too long."""
        return self._process.is_stopped or self._standstill() is not None

    @property
    def is_ready(self) -> bool:
        """Whether it is loaded and live."""
        return self._serving and self.is_live

    @property
    def status(self) -> str:
        """A sentence on what the engine does, or of what it died."""
        if self._dead_of is not None:
            return f"the engine is dead: {self._dead_of}"
        if self._closed:
            return "the engine is shut down"
        if not self._process.is_running:
            return "the engine's process is stopped or gone"
        if (standstill := self._standstill()) is not None:
            return f"the engine is stuck: {standstill}"
        words = PHASE_WORDS[self._process.status.phase]
        return words if self._serving or words.startswith("loading") else "loading: reading the tokenizer"

    async def wait_dead(self) -> EngineDeadError:
        """Waits until the engine is dead; the error's sentence says of what. Never returns after `shutdown`."""
        return await asyncio.shield(self._death)

    def shutdown(self) -> None:
        """Ends the engine; requests in flight end with `EngineDeadError`."""
        if self._closed:
            return
        self._closed = True
        if self._watchdog is not None:
            self._watchdog.cancel()
        self._end_streams()
        if self._tokenizer is not None:
            self._tokenizer.close()
        self._process.close()

    async def generate(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: RequestParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncGenerator[OutputDelta, None]:
        """Yields what each step adds to the request's sequences, until all of them have their finish reason.

        Closing or cancelling the generator aborts the request and frees its blocks.

        Raises:
            RequestError: the request cannot be served as it is; raised before the first delta.
            RequestFailedError: the engine failed at this request.
            EngineDeadError: the engine died, or was shut down.
        """
        self._check_serving()
        words = await self._encoded(params.bad_words) if params.kind == "generate" else ()
        self._check_serving()  # it may have died meanwhile
        assert self._inputs is not None and self._outputs is not None, "the engine is not loaded yet"
        if request_id in self._streams:
            raise RequestError(f"a request with the id {request_id} is running; choose another", "request_id")
        process, outputs = self._process, self._outputs  # of this engine's life: the next one knows nothing of it
        request = self._inputs.request(
            request_id, prompt_token_ids, params, priority=priority, cache_salt=cache_salt, bad_words=words
        )
        stream = self._streams[request_id] = asyncio.Queue()
        unfinished = request.num_sequences
        try:
            outputs.add(request)
            process.send(request)
            self._watch()
            while unfinished:
                item = await stream.get()
                if isinstance(item, EngineDeadError):
                    raise item
                if item.finish_reason is FinishReason.ERROR:
                    raise RequestFailedError(item.error)
                unfinished -= item.finish_reason is not None
                yield item
        finally:
            self._streams.pop(request_id, None)
            outputs.forget(request_id)
            if unfinished:
                process.send(Abort(request_id))

    def _check_serving(self) -> None:
        if not self._serving or self._closed:
            raise EngineDeadError(_DEAD)

    async def _locate(self) -> Path:
        """The model's files, unless the engine dies meanwhile.

        In a thread that nobody waits for when the process ends: a download may last hours.
        """
        located: asyncio.Future[Path] = self._loop.create_future()

        def locate() -> None:
            try:
                self._call(_resolve, located, locate_model(self.args))
            except Exception as error:
                self._call(_resolve, located, error)

        threading.Thread(target=locate, name="locate-model", daemon=True).start()
        either: set[asyncio.Future[Any]] = {located, self._loaded}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._loaded.done():
            self._loaded.result()  # raises: nothing was loaded yet
        return await located

    async def _load_tokenizer(self, model: Path) -> TokenizerProcess:
        path = await asyncio.to_thread(locate_tokenizer, self.args, model)
        tokenizer = TokenizerProcess(path, self._chat_template, self._log_format)
        try:
            await tokenizer.load()
            if self._closed:
                raise EngineDeadError(_DEAD)
        except BaseException:
            tokenizer.close()
            raise
        self._tokenizer = tokenizer
        return tokenizer

    async def _encoded(self, words: tuple[str, ...]) -> tuple[TokenSequence, ...]:
        """Bad words as tokens: encoded once for all the prompts of a request, and mostly for many requests."""
        if not words:
            return ()
        if words not in self._bad_words:
            self._bad_words[words] = asyncio.create_task(self._encode_bad_words(words))
            if len(self._bad_words) > _KEPT_BAD_WORDS:
                self._bad_words.popitem(last=False)
        task = self._bad_words[words]
        try:
            return await asyncio.shield(task)
        except Exception:
            if self._bad_words.get(words) is task:
                del self._bad_words[words]
            raise

    async def _encode_bad_words(self, words: tuple[str, ...]) -> tuple[TokenSequence, ...]:
        encoded = await self.tokenizer.encode(spellings(words), add_special_tokens=False)
        return sequences(words, encoded, self.info.vocab_size)

    def _receive(self, process: EngineProcess, message: Any) -> None:
        """Takes a message of the engine, in the reading thread. What it raises is the engine's death."""
        if isinstance(message, StepOutputs):
            self._call(self._deliver, self._as_text(process, message), message.report)
        elif isinstance(message, LoadFailed):
            self._call(self._resolve_loaded, process, message.error())
        elif isinstance(message, EngineInfo):
            self._call(self._resolve_loaded, process, message)
        else:
            raise TypeError(f"{type(message).__name__} is no message of the engine")

    def _as_text(self, process: EngineProcess, outputs: StepOutputs) -> list[OutputDelta]:
        assert self._outputs is not None, "the engine has no requests before it is loaded"
        told = []
        for delta in outputs.deltas:
            try:
                output, stopped = self._outputs.process(delta)
            except Exception:  # a tokenizer's, say; it is this request's trouble and nobody else's
                logger.exception("the output of request %s cannot be told", delta.request_id)
                output, stopped = OutputDelta(delta.request_id, "", finish_reason=FinishReason.ERROR), False
            if stopped:
                process.send(Stop(delta.request_id, delta.index))
            if output is not None:
                told.append(output)
        return told

    def _call(self, function: Callable[..., None], *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the event loop is closed: nobody is left to be told
            logger.debug("the engine's news come after the end")

    def _deliver(self, deltas: list[OutputDelta], report: StepReport | None) -> None:
        for delta in deltas:
            stream = self._streams.get(delta.request_id)
            if stream is not None:
                stream.put_nowait(delta)
        if report is not None and self.observer is not None:
            self.observer(report)

    def _resolve_loaded(self, process: EngineProcess, result: EngineInfo | Exception) -> None:
        if process is self._process:
            _resolve(self._loaded, result)

    def _die(self, process: EngineProcess, cause: EngineDeadError) -> None:
        if self._closed or self._dead_of is not None or process is not self._process:
            return
        self._dead_of = cause
        self._serving = False
        logger.error("the engine died: %s", cause)
        _resolve(self._loaded, type(cause)(f"the engine died while it loaded: {cause}"))
        self._end_streams(type(cause))
        self._death.set_result(cause)

    def _end_streams(self, kind: type[EngineDeadError] = EngineDeadError) -> None:
        for stream in self._streams.values():
            stream.put_nowait(kind(_DEAD))

    def _standstill(self, lost: float = 0.0) -> str | None:
        """What takes too long, if something does; `lost` seconds of it are not counted."""
        process = self._process
        if (seconds := process.busy_for - lost) > self._step_timeout:
            return f"{PHASE_WORDS[process.status.phase]}, for {seconds:.0f} s"
        if (seconds := process.handling_for - lost) > HANDLING_TIMEOUT_S:
            return f"the server handles one of its messages, for {seconds:.0f} s"
        return None

    def _watch(self) -> None:
        """Sees to it that the watchdog runs."""
        if self._watchdog is None or self._watchdog.done():
            self._watchdog = asyncio.create_task(self._watch_engine())

    async def _watch_engine(self) -> None:
        """Kills an engine that is stopped or stuck while somebody waits for it; ends when nobody does.

        Time in which this process itself did not run does not count: then the engine may have been stopped, too, or
        waited for it.
        """
        stopped_for = lost = 0.0
        looked = time.monotonic()
        while self._dead_of is None and (not self._serving or self._streams):
            await asyncio.sleep(_WATCH_INTERVAL_S)
            elapsed = time.monotonic() - looked
            looked += elapsed
            process = self._process
            still_for = max(process.busy_for, process.handling_for)
            lost = lost if still_for > elapsed else 0.0  # it began before the last look, or is something new
            lost = min(lost + max(elapsed - 2 * _WATCH_INTERVAL_S, 0.0), still_for)
            stopped_for = stopped_for + _WATCH_INTERVAL_S if process.is_stopped else 0.0
            if stopped_for >= STOPPED_TIMEOUT_S:
                death = EngineStuckError(f"it was stopped for {stopped_for:.0f} s, and killed")
            elif (standstill := self._standstill(lost)) is not None:
                death = EngineStuckError(f"it was stuck ({standstill}; --step-timeout), and killed")
            else:
                continue
            process.kill(death)
            await asyncio.wait({self._death}, timeout=_KILL_TIMEOUT_S)
            self._die(process, death)  # nobody waits for a process that cannot be killed


def _resolve(future: asyncio.Future[_T], result: _T | Exception) -> None:
    """Ends a future that has not ended."""
    if future.done():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
