"""Data-parallel engines driven by a script's own thread: to `LLM` they are one engine.

Each is an engine process. What they send comes into one queue, which `step` waits on, so whoever is ready is heard
first; requests are dealt by the same router as a server's.
"""

from __future__ import annotations

import queue
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, Final

from stoker_common.errors import EngineDeadError
from stoker_common.subprocesses.load_failed import LoadFailed
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.core.adapter import AdapterSource, LoadedAdapter
from stoker_engine.core.adapter_load import AdapterLoad
from stoker_engine.core.engine_info import EngineInfo
from stoker_engine.core.engine_request import EngineRequest
from stoker_engine.core.outputs import StepOutputs, TokenDelta
from stoker_engine.grammar.token_table import TokenTable
from stoker_engine.processes.dp_router import DPRouter
from stoker_engine.processes.engine_process import PROGRAM, EngineProcess
from stoker_engine.processes.memory_check import check_memory
from stoker_engine.processes.messages import (
    Abort,
    AdapterReply,
    LoadAdapter,
    MissingRanks,
    RemoveAdapter,
    Stop,
    WaitingForNodes,
)
from stoker_engine.processes.watchdog import INTERVAL_S, StuckDetector

#: Seconds after which a step, or loading that does not get on, counts as stuck.
STEP_TIMEOUT_S: Final = 300.0

#: What is wrong where engines, which share their files, have found different ones.
_CHANGED_FILES: Final = "changed while it was loaded; load it again"

_News = queue.SimpleQueue[tuple[int, Any]]


class DPEngines:
    """Loaded engines of a model and the requests they work on. The processes end with `shutdown`, with this object, or
    with the interpreter, whichever comes first.

    Args:
        args: the engine's; the model is a path.
        program: see `EngineProcess`.

    Attributes:
        info: facts that callers make requests by: what each engine can serve.

    Raises:
        ArgumentError, ModelError: an engine cannot be loaded.
        EngineDeadError: one died while it loaded.
        OSError: the system has no process or memory left.
    """

    def __init__(self, args: EngineArgs, program: Sequence[str] = PROGRAM) -> None:
        check_memory(args)
        self._news: _News = queue.SimpleQueue()
        self._processes: list[EngineProcess] = []
        self._unfinished: dict[str, tuple[int, set[int]]] = {}  # requests → their engine, and which sequences run
        self._adapter_loads: dict[int, AdapterLoad] = {}
        self._dead_of: EngineDeadError | None = None
        self._detectors: dict[int, StuckDetector] = {}  # at engines that are waited for
        self._next_check = 0.0
        self._end = weakref.finalize(self, _end, self._processes)
        try:
            for engine in range(args.data_parallel_size):
                process = EngineProcess(program=program, engine=engine)
                self._processes.append(process)
                on_message = partial(_put_message, self._news, engine)
                process.listen(on_message, on_message)
                process.send(args)
            self.info = self._loaded()
        except BaseException:
            self.shutdown()
            raise
        info = self.info
        self._router = DPRouter(len(self._processes), info.block_size, info.usable_blocks, info.max_num_seqs)

    def _loaded(self) -> EngineInfo:
        infos = dict[int, EngineInfo]()
        while len(infos) < len(self._processes):
            engine, message = self._next(lambda: set(range(len(self._processes))) - infos.keys())
            if isinstance(message, WaitingForNodes | MissingRanks):
                continue  # of which the log tells
            if isinstance(message, LoadFailed):
                raise message.error()
            if isinstance(message, EngineDeadError):
                raise type(message)(f"engine {engine} (of {len(self._processes)}) died while it loaded: {message}")
            assert isinstance(message, EngineInfo), message
            infos[engine] = message
        return replace(
            infos[0],
            max_model_len=min(info.max_model_len for info in infos.values()),
            num_blocks=min(info.num_blocks for info in infos.values()),
        )

    def _next(self, waited_for: Callable[[], Collection[int]]) -> tuple[int, Any]:
        """The next message of any engine. Meanwhile those that are waited for are looked at: one that is stopped, or
        gets no further, is killed, so that its death is the message."""
        while True:
            if (now := time.monotonic()) >= self._next_check:
                self._next_check = now + INTERVAL_S
                self._check_stuck(waited_for())
            try:
                return self._news.get(timeout=INTERVAL_S)
            except queue.Empty:
                continue

    def _check_stuck(self, engines: Collection[int]) -> None:
        known = self._detectors
        self._detectors = {engine: known.get(engine) or StuckDetector(self._processes[engine]) for engine in engines}
        for detector in self._detectors.values():
            if (cause := detector.check(STEP_TIMEOUT_S)) is not None:
                detector.process.kill(cause)

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to wait for."""
        return bool(self._unfinished or self._adapter_loads)

    def set_token_table(self, table: TokenTable) -> None:
        """The vocabulary as bytes, before the first request with a grammar."""
        for process in self._processes:
            process.send(table)

    def load_adapter(self, source: AdapterSource) -> Future[LoadedAdapter]:
        """Loads a LoRA adapter into all engines, while `step` is called.

        Returns:
            What its files hold. It raises `AdapterError` where they cannot be served; no engine has it then.
        """
        names = [_name(engine) for engine in range(len(self._processes))]
        load = self._adapter_loads[source.number] = AdapterLoad(source, names, _CHANGED_FILES)
        for process in self._processes:
            process.send(LoadAdapter(source))
        return load.ready

    def remove_adapter(self, number: int) -> None:
        """Takes no new requests with an adapter; those that are there are served. Unknown ones are ignored."""
        for process in self._processes:
            process.send(RemoveAdapter(number))

    def add(self, request: EngineRequest) -> None:
        """Takes in a request, checked by `tokens.input_processor`.

        Raises:
            EngineDeadError: an engine is dead, or all are shut down.
        """
        if self._dead_of is not None:
            raise self._dead_of
        engine = self._router.begin(
            request.id,
            request.prompt_token_ids,
            request.num_sequences,
            request.cache_keys,
            among=range(len(self._processes)),
        )
        self._unfinished[request.id] = engine, set(range(request.num_sequences))
        self._processes[engine].send(request)

    def abort(self, request_id: str) -> None:
        """Ends a request whose result nobody wants any more; unknown ids are ignored."""
        if request_id in self._unfinished:
            engine, _ = self._unfinished.pop(request_id)
            self._router.end(request_id)
            self._processes[engine].send(Abort(request_id))

    def stop(self, request_id: str, index: int) -> None:
        """Ends one sequence at a stop string that was found in its text; unknown ones are ignored."""
        if request_id in self._unfinished:
            engine, _ = self._unfinished[request_id]
            self._processes[engine].send(Stop(request_id, index))
            self._ended(request_id, index)

    def step(self) -> StepOutputs:
        """Waits for a step of any engine; what it added is returned.

        Raises:
            EngineDeadError: an engine died, or stood still and was killed; there is no more work then, for nobody knows
                what it had done.
        """
        engine, message = self._next(self._engines_at_work)
        if isinstance(message, EngineDeadError):
            self._dead_of = type(message)(f"engine {engine} (of {len(self._processes)}) died: {message}")
            self._unfinished.clear()
            for load in self._adapter_loads.values():
                load.ready.set_exception(self._dead_of)
            self._adapter_loads.clear()
            self._end()
            raise self._dead_of
        if isinstance(message, AdapterReply):
            self._take_adapter(engine, message)
            return StepOutputs([], None)
        assert isinstance(message, StepOutputs), message
        return StepOutputs([delta for delta in message.deltas if self._is_wanted(delta)], message.report)

    def shutdown(self) -> None:
        """Ends the engines; no request can be added after."""
        self._dead_of = self._dead_of or EngineDeadError("the engine is shut down")
        self._unfinished.clear()
        self._end()

    def _engines_at_work(self) -> set[int]:
        if self._adapter_loads:
            return set(range(len(self._processes)))
        return {engine for engine, _ in self._unfinished.values()}

    def _take_adapter(self, engine: int, reply: AdapterReply) -> None:
        """What an engine says of an adapter. Once all have answered, either all have it or none."""
        load = self._adapter_loads[reply.number]
        if not load.answer(_name(engine), reply.loaded, reply.error):
            return
        del self._adapter_loads[reply.number]
        error = load.error()
        if error is not None:
            for process in self._processes:
                process.send(RemoveAdapter(reply.number))
        load.end(error)

    def _is_wanted(self, delta: TokenDelta) -> bool:
        """Whether somebody waits for a delta; takes down what it says of its request."""
        if delta.request_id not in self._unfinished:
            return False
        self._router.mark_started(delta.request_id)
        if delta.finish_reason is not None:
            self._ended(delta.request_id, delta.index)
        return True

    def _ended(self, request_id: str, index: int) -> None:
        _, running = self._unfinished[request_id]
        running.discard(index)
        if not running:
            del self._unfinished[request_id]
            self._router.end(request_id)


def _name(engine: int) -> str:
    return f"engine {engine}"


def _put_message(news: _News, engine: int, message: Any) -> None:
    """In an engine's reading thread, which keeps nothing else alive."""
    news.put((engine, message))


def _end(processes: list[EngineProcess]) -> None:
    for process in processes:
        process.ask_to_end()
    for process in processes:
        process.close()
