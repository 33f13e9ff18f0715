"""Asynchronous client of the engines: coroutines add requests and await their deltas, while processes run the engines.

    add_request ─► InputProcessor ─► router ─► engine process ─► reading thread: text ─► OutputStream ─► consumer
                                               one of the engines

The engine processes start when the client is created, and so does a thread that finds the model's files and starts the
tokenizer's process (`processes/model_files.py`); `load` sends the files' path to the engines. This module does not
import torch. The state of one engine is in `processes/dp_engine.py`; when an engine dies, only its own requests fail.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial

from stoker_common.errors import EngineDeadError, RequestError, RequestFailedError, StokerError
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.contract.engine_state import EngineState
from stoker_engine.core.adapter import NO_ADAPTER, AdapterSource, LoadedAdapter
from stoker_engine.core.engine_info import EngineInfo
from stoker_engine.core.engine_request import EngineRequest
from stoker_engine.core.grammar import Grammar
from stoker_engine.core.outputs import OutputDelta, TokenDelta
from stoker_engine.core.sampling_params import RequestParams
from stoker_engine.core.step_report import StepReport
from stoker_engine.parallel.layout import RankLayout
from stoker_engine.processes.dp_adapters import DPAdapter, DPAdapters
from stoker_engine.processes.dp_engine import DEAD, DPEngine
from stoker_engine.processes.dp_router import DPRouter
from stoker_engine.processes.engine_pipe import EnginePipe
from stoker_engine.processes.engine_process import PROGRAM, EngineProcess
from stoker_engine.processes.memory_check import check_memory
from stoker_engine.processes.model_files import ModelFiles
from stoker_engine.tokens.bad_words import BadWords
from stoker_engine.tokens.input_processor import InputProcessor
from stoker_engine.tokens.output_stream import OutputStream
from stoker_engine.tokens.prompt_tokens import PromptTokens, prompt_tokens
from stoker_engine.tokens.tokenizer import read_chat_template
from stoker_engine.tokens.tokenizer_process import TokenizerProcess

logger = logging.getLogger(__name__)


class AsyncLLM:
    """Client of one or several engines, each in its own process, for one event loop; the server's `EngineClient`.

    Args:
        chat_template: a Jinja template or its file, instead of the model's.
        step_timeout: seconds after which a step, or a phase of loading without progress, counts as stuck.
        log_format: log format of the processes; see `logs.configure`.
        program: program of each engine process; tests replace it.
        start: starts a process of the engine with that index, or links this front end to its next process; None: each
            engine is started as a child process.
        files: `args` with the path of the model's files that another process found; None: this process finds them.
        min_engines: number of engines that `load` waits for, if other engines may stay dead; None: all.

    Raises:
        ArgumentError: the chat template's file cannot be read, or memory is too small for the engines.

    Attributes:
        on_step: called in the event loop with the report of each step.
        on_later_load: called in the event loop with the index of an engine that is loaded after `load` has returned.
        engines: the data-parallel engines, by index.
    """

    def __init__(
        self,
        args: EngineArgs,
        *,
        chat_template: str | None = None,
        step_timeout: float = 300.0,
        log_format: str = "text",
        program: Sequence[str] = PROGRAM,
        start: Callable[[int], EnginePipe] | None = None,
        files: Future[EngineArgs] | None = None,
        min_engines: int | None = None,
    ) -> None:
        check_memory(args)
        read_chat_template(chat_template)  # reports a wrong file name now, not after the model is loaded
        self.args = args
        self.on_step: Callable[[StepReport], None] | None = None
        self.on_later_load: Callable[[int], None] | None = None
        self.engines: list[DPEngine] = []
        self._adapters = DPAdapters(self.engines, self._check_serving)
        self._model = ModelFiles(args, chat_template, log_format, files)
        self._min_engines = args.data_parallel_size if min_engines is None else min_engines
        self._later_loads: set[asyncio.Task[None]] = set()
        self._info: EngineInfo | None = None
        self._infos: dict[int, EngineInfo] = {}
        self._bad_words: BadWords | None = None
        self._inputs: InputProcessor | None = None
        self._router: DPRouter | None = None
        self._closed = False
        self._telling = asyncio.Lock()
        several, ranks = args.data_parallel_size > 1, RankLayout.of(args).size
        try:
            for engine_index in range(args.data_parallel_size):
                name = f"engine {engine_index} (of {args.data_parallel_size})" if several else ""
                start_engine: Callable[[], EnginePipe] = (
                    partial(EngineProcess, log_format, program, step_timeout, engine_index if several else None)
                    if start is None
                    else partial(start, engine_index)
                )
                on_step = partial(self._on_outputs, engine_index)
                self.engines.append(DPEngine(engine_index, name, ranks, start_engine, step_timeout, on_step))
        except BaseException:
            self.shutdown()
            raise
        self._model.start()

    async def load(self, engine: int | None = None) -> EngineInfo:
        """Load engines, and wait until they are loaded. Called once, and again to reload dead engines.

        Engines that another process owns are loaded again whenever they die meanwhile, and only `min_engines` are
        awaited; `on_later_load` reports the others.

        Args:
            engine: index of the engine; None: all engines that are not loaded.

        Returns:
            `info`.

        Raises:
            ArgumentError, ModelError: loading failed, and the client is shut down.
            EngineDeadError: an engine died during loading, or one of several cannot be reloaded while others serve.
        """
        if engine is None and self.engines[0].process.is_shared:
            await self._join()
            return self.info
        if engine is None:
            engine_indices = [engine_index for engine_index, each in enumerate(self.engines) if not each.takes_requests]
        else:
            engine_indices = [engine]
        loads = [asyncio.create_task(self._load(engine_index)) for engine_index in engine_indices]
        try:
            await asyncio.gather(*loads)
        except EngineDeadError:
            raise
        except BaseException:
            self.shutdown()
            raise
        finally:
            for load in loads:
                load.cancel()
        return self.info

    async def _join(self) -> None:
        """Link to all engines, which another process owns, until `_min_engines` of them are loaded. The others are
        loaded when they can be; `wait_dead` reports those that died meanwhile."""
        loads: dict[asyncio.Task[None], int] = {}
        to_load: list[int] = list(range(len(self.engines)))
        try:
            while len(self._infos) < self._min_engines:
                loads |= {asyncio.create_task(self._load(index)): index for index in to_load}
                done, _ = await asyncio.wait(loads, return_when=asyncio.FIRST_COMPLETED)
                ended = {loads.pop(load): load.exception() for load in done}
                for error in ended.values():
                    if error is not None and (self._closed or not isinstance(error, EngineDeadError)):
                        raise error
                to_load = [index for index, error in ended.items() if error is not None]
        except BaseException:
            for load in loads:
                load.cancel()
            self.shutdown()
            raise
        for load, engine_index in loads.items():
            load.add_done_callback(partial(self._on_later_load, engine_index))
        self._later_loads = set(loads)  # the event loop has only weak references

    def _on_later_load(self, engine_index: int, load: asyncio.Task[None]) -> None:
        if not load.cancelled() and load.exception() is None and self.on_later_load is not None:  # else see `wait_dead`
            self.on_later_load(engine_index)

    async def _load(self, engine_index: int) -> None:
        engine = self.engines[engine_index]
        try:
            loaded = engine.load(self._model.located())
            table_read = _nothing() if engine.process.is_shared else self._model.token_table()
            info, tokenizer, table = await asyncio.gather(loaded, self._model.loaded_tokenizer(), table_read)
        except EngineDeadError:
            raise
        except StokerError as error:
            if engine_index not in self._infos or not any(each.is_ready for each in self.engines):
                raise
            # Other engines serve, so the client stays up; the caller may try again.
            death = EngineDeadError(f"it cannot be loaded: {error}")
            engine.die(death)
            raise death from error
        await self._adapters.reload(engine)
        if self._closed:
            raise EngineDeadError(DEAD)
        if self._router is None:
            self._router = DPRouter(len(self.engines), info.block_size, info.usable_blocks, info.max_num_seqs)
        self._router.forget(engine_index)
        self._bad_words = self._bad_words or BadWords(tokenizer, info.vocab_size)
        if table is not None:
            engine.send_token_table(table)  # before requests, which would wait while the engine reads it
        engine.serve(tokenizer.vocabulary)  # raises if the engine has died, which then does not count as loaded
        self._infos[engine_index] = info
        self._show(engine_index)

    def _show(self, newest: int) -> None:
        """Set `info` to that of engine `newest`, with the lowest limits of all: a request may go to any engine."""
        infos = self._infos.values()
        info = dataclasses.replace(
            self._infos[newest],
            max_model_len=min(each.max_model_len for each in infos),
            num_blocks=min(each.num_blocks for each in infos),
        )
        if info != self._info:
            self._info, self._inputs = info, InputProcessor(info, None)

    @property
    def files(self) -> Future[EngineArgs]:
        """`args` with the path of the model's files, once they are found."""
        return self._model.args

    @property
    def info(self) -> EngineInfo:
        """Properties of the loaded engines, with the lowest limits of all."""
        assert self._info is not None, "the engine is not loaded yet"
        return self._info

    def info_of(self, engine: int) -> EngineInfo:
        """Return an engine's properties from its last load."""
        return self._infos[engine]

    @property
    def tokenizer(self) -> TokenizerProcess:
        """The model's tokenizer. Available after loading."""
        assert self._model.tokenizer is not None, "the engine is not loaded yet"
        return self._model.tokenizer

    @property
    def adapters(self) -> Mapping[int, DPAdapter]:
        """The loaded LoRA adapters by number."""
        return self._adapters.by_number

    @property
    def num_engines(self) -> int:
        """Number of data-parallel engines."""
        return len(self.engines)

    def serves(self, engine: int) -> bool:
        """Whether an engine is loaded and live."""
        return self.engines[engine].is_ready

    @property
    def is_live(self) -> bool:
        """Whether the process of at least one engine runs, and neither its step nor its phase of loading exceeds the
        timeout."""
        return any(engine.is_live for engine in self.engines)

    @property
    def is_stuck(self) -> bool:
        """Whether all engines that are not dead, at least one, are stuck: their processes are stopped, or a step or a
        phase of loading exceeds the timeout."""
        return any(engine.is_stuck for engine in self.engines) and all(
            engine.is_stuck or engine.is_dead for engine in self.engines
        )

    @property
    def is_ready(self) -> bool:
        """Whether each engine, or `min_engines`, has been loaded at least once, and at least one is loaded and live."""
        return len(self._infos) >= self._min_engines and any(engine.is_ready for engine in self.engines)

    @property
    def status(self) -> str:
        """Sentence on the state of the engine or the cause of its death; with several engines, on each."""
        if len(self.engines) == 1:
            return self.engines[0].status
        # Not the phase of an engine that serves, which changes with every step.
        return "; ".join(f"{engine.name}: {'serving' if engine.is_ready else engine.status}" for engine in self.engines)

    @property
    def engine_states(self) -> list[EngineState]:
        """State of each engine, in order."""
        return [engine.state for engine in self.engines]

    async def wait_dead(self, engine: int = 0) -> EngineDeadError:
        """Wait until an engine is dead, and return the cause. Never returns after `shutdown`."""
        return await self.engines[engine].wait_dead()

    def shutdown(self) -> None:
        """Shut down all processes; requests in flight end with `EngineDeadError`."""
        if self._closed:
            return
        self._closed = True
        for engine in self.engines:
            engine.shutdown()
        self._model.close()
        for engine in self.engines:
            engine.process.ask_to_end()
        for engine in self.engines:
            engine.close()

    async def generate(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: RequestParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        adapter: int = NO_ADAPTER,
    ) -> AsyncGenerator[OutputDelta, None]:
        """Yield the deltas of the request's sequences until each sequence has a finish reason.

        Outputs of several steps are merged into one delta per sequence if they are not consumed in between. Closing or
        cancelling the generator aborts the request and frees its blocks.

        Raises:
            RequestError: the request is invalid; raised before the first delta.
            RequestFailedError: an engine failed on this request or on its LoRA adapter.
            EngineDeadError: no engine serves, or the request's engine died or was shut down.
        """
        self._check_serving()
        prompt = prompt_tokens(prompt_token_ids, params.truncate_prompt_tokens, params.num_wanted, self.info)
        stream = OutputStream()
        unfinished = await self.add_request(
            stream, request_id, prompt, params, priority=priority, cache_salt=cache_salt, adapter=adapter
        )
        try:
            while unfinished:
                for delta in await stream.get():
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
        adapter: int = NO_ADAPTER,
    ) -> int:
        """Start a request, whose deltas go to `stream`. The caller must call `abort` in the end.

        Args:
            adapter: number of the request's LoRA adapter.

        Returns:
            Number of sequences, each of which ends with a finish reason.

        Raises:
            RequestError: the request is invalid.
            RequestFailedError: no serving engine could load the request's LoRA adapter again.
            EngineDeadError: no engine can take the request. If its engine dies later, the stream raises this error.
        """
        self._check_serving()
        assert self._inputs is not None and self._bad_words is not None
        bad_word_tokens = await self._bad_words.encoded(params.bad_words)
        grammar = await self._grammar(params)
        self._check_serving()  # engines may have died meanwhile
        if self.has(request_id):
            raise RequestError(f"a request with the id {request_id} is running; choose another", "request_id")
        if adapter != NO_ADAPTER and adapter not in self.adapters:
            raise RequestError("the LoRA adapter of this request is not loaded", "model")
        request = self._inputs.of_prompt(
            request_id,
            prompt,
            params,
            priority=priority,
            cache_salt=cache_salt,
            bad_words=bad_word_tokens,
            grammar=grammar,
            adapter=adapter,
            adapter_digest=self.adapters[adapter].source.digest if adapter != NO_ADAPTER else "",
        )
        engine = self._route(request)
        try:
            engine.begin(stream, request)
        except BaseException:
            self.abort(request_id)
            raise
        return request.num_sequences

    async def load_adapter(self, source: AdapterSource) -> LoadedAdapter:
        """Load an adapter into all serving engines, after which requests may use its number. Engines that are reloaded
        later load it, too.

        Raises:
            AdapterError: loading failed; no engine keeps the adapter.
            EngineDeadError: no engine serves, or all that serve died meanwhile.
        """
        return await self._adapters.load(source)

    def remove_adapter(self, number: int) -> None:
        """Refuse new requests for an adapter, and let all engines drop it once its requests have ended. Unknown numbers
        are ignored."""
        self._adapters.remove(number)

    def adapter_error(self, number: int) -> str | None:
        """Return the error of a loaded adapter that no serving engine could load again. None: the adapter is usable,
        or unknown. Thread-safe."""
        return self._adapters.error_of(number)

    def _route(self, request: EngineRequest) -> DPEngine:
        """Choose the engine for a request."""
        if (error := self.adapter_error(request.adapter)) is not None:
            raise RequestFailedError(error)
        if len(self.engines) == 1:
            return self.engines[0]
        able = [n for n, engine in enumerate(self.engines) if engine.is_ready]
        # If no engine seems to run, include stopped ones, which may continue soon; the watchdog checks them.
        able = able or [n for n, engine in enumerate(self.engines) if engine.takes_requests]
        for engine in self.engines:
            engine.watch_if_stopped()
        if request.adapter != NO_ADAPTER:
            able = [n for n in able if n not in self.adapters[request.adapter].errors]
        if not able:
            raise EngineDeadError(DEAD)
        assert self._router is not None
        prompt, keys = request.prompt_token_ids, request.cache_keys
        return self.engines[self._router.begin(request.id, prompt, request.num_sequences, keys, among=able)]

    async def _grammar(self, params: RequestParams) -> Grammar | None:
        """Return the validated grammar of a request, after all serving engines have received the vocabulary. None: the
        request has no grammar."""
        structured = params.structured_outputs
        if structured is None:
            return None
        source = await self.tokenizer.compile_grammar(structured)
        async with self._telling:
            while any(engine.takes_requests and not engine.knows_vocabulary for engine in self.engines):
                table = await self.tokenizer.token_table()
                self._check_serving()
                for engine in self.engines:
                    if engine.takes_requests and not engine.knows_vocabulary:
                        engine.send_token_table(table)
        return Grammar(source, structured.begins_after)

    def has(self, request_id: str) -> bool:
        """Whether a request is running on an engine."""
        return any(request_id in engine.streams for engine in self.engines)

    def abort(self, request_id: str) -> None:
        """Abort a request if it is running, and forget it. Unknown ids are ignored."""
        if self._router is not None:
            self._router.end(request_id)
        for engine in self.engines:
            engine.abort(request_id)

    def _check_serving(self) -> None:
        if not any(engine.takes_requests for engine in self.engines):
            raise EngineDeadError(DEAD)

    def _on_outputs(self, engine: int, deltas: Sequence[TokenDelta], report: StepReport | None) -> None:
        if self._router is not None and len(self.engines) > 1:
            for delta in deltas:
                self._router.mark_started(delta.request_id)
            if report is not None:
                self._router.report(engine, report.stats)
        if report is not None and self.on_step is not None:
            self.on_step(dataclasses.replace(report, engine=engine) if engine else report)


async def _nothing() -> None:
    """Return nothing, in place of a result that is not needed."""
