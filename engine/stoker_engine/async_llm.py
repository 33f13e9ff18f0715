"""The engine behind an event loop: coroutines make requests and await their deltas, a process of its own computes.

    add_request ─► InputProcessor ─► engine process ─► reading thread: text ─► OutputStream ─► whoever takes from it

The engine's process starts when the client is made; `load` then finds the model's files, hands them over, and loads
the tokenizer meanwhile. Nothing here imports torch.

Whether the engine lives is looked up when somebody asks, from what cannot lie: the process's state, and since when it
is at its current step. While somebody waits for it, a `Watchdog` looks too.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from stoker_engine.children.load_failed import LoadFailed
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.contract.errors import EngineDeadError, RequestError
from stoker_engine.core.engine_info import EngineInfo
from stoker_engine.core.finish_reason import FinishReason
from stoker_engine.core.grammar import Grammar
from stoker_engine.core.outputs import OutputDelta, StepOutputs, TokenDelta
from stoker_engine.core.sampling_params import RequestParams
from stoker_engine.core.step_report import StepReport
from stoker_engine.models.locate import locate_model, locate_tokenizer
from stoker_engine.processes.engine_process import PROGRAM, EngineProcess
from stoker_engine.processes.messages import Abort, Stop
from stoker_engine.processes.status_word import PHASE_WORDS
from stoker_engine.processes.watchdog import Watchdog
from stoker_engine.tokens.bad_words import BadWords
from stoker_engine.tokens.input_processor import InputProcessor
from stoker_engine.tokens.output_processor import OutputProcessor
from stoker_engine.tokens.output_stream import OutputStream
from stoker_engine.tokens.prompt_tokens import PromptTokens, prompt_tokens
from stoker_engine.tokens.tokenizer import read_chat_template
from stoker_engine.tokens.tokenizer_process import TokenizerProcess

logger = logging.getLogger(__name__)

_DEAD = "the engine has stopped; see the server's log"

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
        on_step: called in the event loop with what each step did.
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
        read_chat_template(chat_template)  # a wrong name is an error now, not once the model is loaded
        self.args = args
        self.on_step: Callable[[StepReport], None] | None = None
        self._chat_template = chat_template
        self._log_format = log_format
        self._watchdog = Watchdog(step_timeout, self._is_waited_for, self._die)
        self._start = partial(EngineProcess, log_format, program, step_timeout)
        self._process = self._start()
        self._serving = False
        self._path: Path | None = None
        self._info: EngineInfo | None = None
        self._tokenizer: TokenizerProcess | None = None
        self._tokenizer_load: asyncio.Task[TokenizerProcess] | None = None
        self._bad_words: BadWords | None = None
        self._inputs: InputProcessor | None = None
        self._outputs: OutputProcessor | None = None
        self._dead_of: EngineDeadError | None = None
        self._closed = False
        self._streams: dict[str, OutputStream] = {}
        self._told: EngineProcess | None = None  # which engine has the vocabulary as bytes
        self._telling = asyncio.Lock()

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
        self._watchdog.watch(process, self._death)
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
        self._bad_words = self._bad_words or BadWords(tokenizer, info.vocab_size)
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
        return self._dead_of is None and not self._closed and self._process.is_running and self._standstill is None

    @property
    def is_stuck(self) -> bool:
        """Whether its process is there, but stopped, or with a step that takes too long."""
        return self._process.is_stopped or self._standstill is not None

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
        if (standstill := self._standstill) is not None:
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
        self._watchdog.stop()
        self._end_streams()
        if self._tokenizer is not None:
            self._tokenizer.close()
        self._process.close()

    async def generate(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: RequestParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncGenerator[OutputDelta, None]:
        """Yields what is added to the request's sequences, until all of them have their finish reason.

        What several steps add to a sequence while nobody asks for it comes as one delta. Closing or cancelling the
        generator aborts the request and frees its blocks.

        Raises:
            RequestError: the request cannot be served as it is; raised before the first delta.
            RequestFailedError: the engine failed at this request.
            EngineDeadError: the engine died, or was shut down.
        """
        self._check_serving()
        prompt = prompt_tokens(prompt_token_ids, params.truncate_prompt_tokens, params.max_tokens, self.info)
        stream = OutputStream()
        unfinished = await self.add_request(
            stream, request_id, prompt, params, priority=priority, cache_salt=cache_salt
        )
        try:
            while unfinished:
                for delta in await stream.take():
                    unfinished -= delta.finish_reason is not None
                    yield delta
        finally:
            self.abort(request_id)

    async def add_request(
        self,
        stream: OutputStream,
        request_id: str,
        prompt: PromptTokens,
        params: RequestParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> int:
        """Begins a request, whose deltas go to `stream`. Whoever calls this calls `abort` in the end.

        Returns:
            How many sequences there will be, each of which ends with a finish reason.

        Raises:
            RequestError: the request cannot be served as it is.
            EngineDeadError: the engine is dead. Where it dies later, the stream raises it.
        """
        self._check_serving()
        assert self._inputs is not None and self._outputs is not None and self._bad_words is not None
        words = await self._bad_words.encoded(params.bad_words) if params.kind == "generate" else ()
        grammar = await self._grammar(params)
        self._check_serving()  # it may have died meanwhile
        if request_id in self._streams:
            raise RequestError(f"a request with the id {request_id} is running; choose another", "request_id")
        request = self._inputs.of_prompt(
            request_id, prompt, params, priority=priority, cache_salt=cache_salt, bad_words=words, grammar=grammar
        )
        self._streams[request_id] = stream
        self._outputs.add(request)
        try:
            self._process.send(request)
        except BaseException:
            self.abort(request_id)
            raise
        self._watchdog.watch(self._process, self._death)
        return request.num_sequences

    async def _grammar(self, params: RequestParams) -> Grammar | None:
        """The grammar that a request asks for, checked; the engine's process knows the vocabulary then."""
        structured = params.structured_outputs if params.kind == "generate" else None
        if structured is None:
            return None
        source = await self.tokenizer.compile_grammar(structured)
        async with self._telling:
            while self._told is not self._process:
                process, table = self._process, await self.tokenizer.token_table()
                self._check_serving()
                if process is self._process:  # else another engine has come meanwhile
                    process.send(table)
                    self._told = process
        return Grammar(source, structured.begins_after)

    def abort(self, request_id: str) -> None:
        """Ends a request, if it runs, and forgets it. Unknown ids are ignored."""
        if self._streams.pop(request_id, None) is None:
            return
        assert self._outputs is not None
        if self._outputs.forget(request_id):
            self._process.send(Abort(request_id))

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

    def _receive(self, process: EngineProcess, message: Any) -> None:
        """Takes a message of the engine, in the reading thread. What it raises is the engine's death."""
        if isinstance(message, StepOutputs):
            self._call(self._on_outputs, self._put(process, message.deltas), message.report)
        elif isinstance(message, LoadFailed):
            self._call(self._resolve_loaded, process, message.error())
        elif isinstance(message, EngineInfo):
            self._call(self._resolve_loaded, process, message)
        else:
            raise TypeError(f"{type(message).__name__} is no message of the engine")

    def _put(self, process: EngineProcess, deltas: Sequence[TokenDelta]) -> list[OutputStream]:
        """Puts the text of a step into its streams, and returns those to be woken."""
        assert self._outputs is not None, "the engine has no requests before it is loaded"
        to_wake = []
        for delta in deltas:
            try:
                output, stopped = self._outputs.process(delta)
            except Exception:  # a tokenizer's, say; it is this request's trouble and nobody else's
                logger.exception("the output of request %s has no text", delta.request_id)
                output, stopped = OutputDelta(delta.request_id, "", finish_reason=FinishReason.ERROR), False
            if stopped:
                process.send(Stop(delta.request_id, delta.index))
            stream = self._streams.get(delta.request_id)
            if output is not None and stream is not None and stream.put(output):
                to_wake.append(stream)
        return to_wake

    def _call(self, function: Callable[..., None], *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the event loop is closed: nobody is left to hear of it
            logger.debug("the engine's news come after the end")

    def _on_outputs(self, to_wake: Sequence[OutputStream], report: StepReport | None) -> None:
        for stream in to_wake:
            stream.wake()
        if report is not None and self.on_step is not None:
            self.on_step(report)

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
        self._end_streams(type(cause), _for_clients(cause))
        self._death.set_result(cause)

    def _end_streams(self, kind: type[EngineDeadError] = EngineDeadError, message: str = _DEAD) -> None:
        for stream in self._streams.values():
            stream.fail(kind(message))
        self._streams.clear()

    def _is_waited_for(self) -> bool:
        return not self._serving or bool(self._streams)

    @property
    def _standstill(self) -> str | None:
        return self._watchdog.standstill(self._process)


def _for_clients(cause: EngineDeadError) -> str:
    """What clients are told of a death: how a process ended, but not the words of an error within."""
    return _DEAD if type(cause) is EngineDeadError else f"the engine has stopped: {cause}"


def _resolve(future: asyncio.Future[_T], result: _T | Exception) -> None:
    """Ends a future that has not ended."""
    if future.done():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
