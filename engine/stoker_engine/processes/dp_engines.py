"""Data-parallel engines that a script's own thread drives. `LLM` uses them like an `Engine`.

Each engine runs in its own process. All messages arrive in one queue, which `step` waits for, so results are processed
in the order of arrival. Requests are distributed by the same router as in the server.
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

#: Seconds after which a step, or loading without progress, counts as stuck.
STEP_TIMEOUT_S: Final = 300.0

#: Verb phrase of the error if engines, which share their files, have read different files; see `AdapterLoad`.
_CHANGED_FILES: Final = "changed while it was loaded; load it again"

_News = queue.SimpleQueue[tuple[int, Any]]


class DPEngines:
    """The loaded engines of a model and their requests. The processes end at `shutdown`, or at the end of this
    object or of the interpreter.

    Args:
        args: the engine's arguments; the model must be a path.
        program: see `EngineProcess`.

    Attributes:
        info: properties that callers need to build requests: what all engines can serve.

    Raises:
        ArgumentError, ModelError: an engine cannot be loaded.
        EngineDeadError: an engine died during loading.
        OSError: the system has no processes or memory left.
    """

    def __init__(self, args: EngineArgs, program: Sequence[str] = PROGRAM) -> None:
        check_memory(args)
        self._news: _News = queue.SimpleQueue()
        self._processes: list[EngineProcess] = []
        self._unfinished: dict[str, tuple[int, set[int]]] = {}  # by request: its engine, unfinished sequences
        self._adapter_loads: dict[int, AdapterLoad] = {}
        self._dead_of: EngineDeadError | None = None
        self._detectors: dict[int, StuckDetector] = {}  # for engines that are waited for
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
                continue  # only a server reports these
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
        """Return the index of an engine and its next message. The engines `waited_for()` are checked meanwhile: a
        stopped or stuck engine is killed, and its `EngineDeadError` arrives as a message."""
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
        """Whether `step` has results to wait for."""
        return bool(self._unfinished or self._adapter_loads)

    def set_token_table(self, table: TokenTable) -> None:
        """Set the vocabulary as bytes. Must be called before the first request with a grammar."""
        for process in self._processes:
            process.send(table)

    def load_adapter(self, source: AdapterSource) -> Future[LoadedAdapter]:
        """Load a LoRA adapter into all engines, during calls of `step`.

        Returns:
            Future of the loaded adapter. It raises `AdapterError` if loading failed (no engine keeps the adapter then),
            and `EngineDeadError` if an engine died.
        """
        names = [_name(engine) for engine in range(len(self._processes))]
        load = self._adapter_loads[source.number] = AdapterLoad(source, names, _CHANGED_FILES)
        for process in self._processes:
            process.send(LoadAdapter(source))
        return load.ready

    def remove_adapter(self, number: int) -> None:
        """Refuse new requests for an adapter; current ones continue. Unknown numbers are ignored."""
        for process in self._processes:
            process.send(RemoveAdapter(number))

    def add(self, request: EngineRequest) -> None:
        """Add a request that `tokens.input_processor` has validated.

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
        """Abort a request whose result is not needed any more; unknown ids are ignored."""
        if request_id in self._unfinished:
            engine, _ = self._unfinished.pop(request_id)
            self._router.end(request_id)
            self._processes[engine].send(Abort(request_id))

    def stop(self, request_id: str, index: int) -> None:
        """End sequence `index` of a request at a stop string in its text; unknown requests are ignored."""
        if request_id in self._unfinished:
            engine, _ = self._unfinished[request_id]
            self._processes[engine].send(Stop(request_id, index))
            self._ended(request_id, index)

    def step(self) -> StepOutputs:
        """Wait for a step of any engine, and return its outputs for unfinished requests. The outputs are empty if a
        reply about the loading of an adapter arrives instead.

        Raises:
            EngineDeadError: an engine died, or was killed. All engines are then ended, and all requests are dropped.
        """
        engine, message = self._next(self._engines_at_work)
        if isinstance(message, EngineDeadError):
            self._dead_of = type(message)(f"engine {engine} (of {len(self._processes)}) died: {message}")
            self._unfinished.clear()
            self._fail_adapter_loads(self._dead_of)
            self._end()
            raise self._dead_of
        if isinstance(message, AdapterReply):
            self._take_adapter(engine, message)
            return StepOutputs([], None)
        assert isinstance(message, StepOutputs), message
        return StepOutputs([delta for delta in message.deltas if self._is_wanted(delta)], message.report)

    def shutdown(self) -> None:
        """Shut down the engines; no further requests are accepted, and loads of adapters fail."""
        self._dead_of = self._dead_of or EngineDeadError("the engine is shut down")
        self._unfinished.clear()
        self._fail_adapter_loads(self._dead_of)
        self._end()

    def _engines_at_work(self) -> set[int]:
        if self._adapter_loads:
            return set(range(len(self._processes)))
        return {engine for engine, _ in self._unfinished.values()}

    def _take_adapter(self, engine: int, reply: AdapterReply) -> None:
        """Record an engine's answer to a load. Once all have answered, either all keep the adapter or none does."""
        load = self._adapter_loads[reply.number]
        if not load.answer(_name(engine), reply.loaded, reply.error):
            return
        del self._adapter_loads[reply.number]
        error = load.error()
        if error is not None:
            for process in self._processes:
                process.send(RemoveAdapter(reply.number))
        load.end(error)

    def _fail_adapter_loads(self, error: EngineDeadError) -> None:
        for load in self._adapter_loads.values():
            load.end(error)
        self._adapter_loads.clear()

    def _is_wanted(self, delta: TokenDelta) -> bool:
        """Whether a delta belongs to an unfinished request; records its progress."""
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
    """Queue a message. Runs in an engine's reading thread, and must not keep the `DPEngines` alive."""
    news.put((engine, message))


def _end(processes: list[EngineProcess]) -> None:
    for process in processes:
        process.ask_to_end()
    for process in processes:
        process.close()
