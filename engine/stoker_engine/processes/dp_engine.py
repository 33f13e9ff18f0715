"""The server's handle of one engine of the model: its process, its requests, and the replacement of a dead process.

Each query of the engine's state reads reliable sources: the state of the process, and its heartbeat. While requests or
loads wait for the engine, a `Watchdog` checks it, too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from stoker_common.errors import AdapterError, EngineDeadError
from stoker_common.subprocesses.load_failed import LoadFailed
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.contract.engine_state import EngineState
from stoker_engine.core.adapter import AdapterSource, LoadedAdapter
from stoker_engine.core.engine_info import EngineInfo
from stoker_engine.core.engine_request import EngineRequest
from stoker_engine.core.finish_reason import FinishReason
from stoker_engine.core.outputs import OutputDelta, StepOutputs, TokenDelta
from stoker_engine.core.step_report import StepReport
from stoker_engine.grammar.token_table import TokenTable
from stoker_engine.processes.engine_pipe import EnginePipe
from stoker_engine.processes.heartbeat import PHASE_LABELS
from stoker_engine.processes.messages import (
    Abort,
    AdapterReply,
    LoadAdapter,
    MissingRanks,
    RemoveAdapter,
    Stop,
    WaitingForNodes,
)
from stoker_engine.processes.watchdog import Watchdog
from stoker_engine.tokens.output_processor import OutputProcessor, TokenTexts
from stoker_engine.tokens.output_stream import OutputStream

logger = logging.getLogger(__name__)

DEAD: Final = "the engine has stopped; see the server's log"

_T = TypeVar("_T")


class DPEngine:
    """One engine, for one event loop. Its process starts immediately.

    Args:
        number: index of the engine.
        name: name in messages and logs; empty: the only engine.
        ranks: number of its ranks.
        start: starts a process of the engine, or links this front end to its next process.
        step_timeout: seconds after which a step, or a phase of loading without progress, counts as stuck.
        on_step: called in the event loop with the new tokens and the report of each step that has either.

    Attributes:
        process: the newest process.
        streams: destinations of deltas, by id of the engine's requests.
        outputs: converts tokens to text; None before the first `serve`.
    """

    def __init__(
        self,
        number: int,
        name: str,
        ranks: int,
        start: Callable[[], EnginePipe],
        step_timeout: float,
        on_step: Callable[[Sequence[TokenDelta], StepReport | None], None],
    ) -> None:
        self.number, self.name, self.ranks = number, name, ranks
        self.watchdog = Watchdog(step_timeout, self._has_waiters, self._die, self._on_hang)
        self.process = start()
        self.streams: dict[str, OutputStream] = {}
        self.outputs: OutputProcessor | None = None
        self._start = start
        self._on_step = on_step
        self._serving = self._is_loaded = False
        self._missing = tuple(range(ranks))
        self._info: EngineInfo | None = None
        self._token_table_sent_to: EnginePipe | None = None  # the process that has the vocabulary as bytes
        self._dead_of: EngineDeadError | None = None
        self._died_of: EngineDeadError | None = None  # error of the previous process, until this one serves
        self._waiting = ""  # the reason why loading waits for other nodes; empty: it does not
        self._adapter_loads: dict[int, asyncio.Future[LoadedAdapter]] = {}
        self._closed = False

    async def load(self, args: asyncio.Future[EngineArgs]) -> EngineInfo:
        """Wait until the engine is loaded; `serve` must follow. Called once, and after each death: it then starts
        another process.

        Args:
            args: future of the engine's arguments with the path of the model's files; a shared engine's owner sends
                them.

        Raises:
            ArgumentError, ModelError: loading failed.
            EngineDeadError: the engine died during loading, or its process cannot be started.
        """
        if self._dead_of is not None:
            self.process.close()
            try:
                self.process = self._start()
            except OSError as error:
                raise EngineDeadError(f"its process cannot be started: {error.strerror}") from error
            self._dead_of, self._died_of = None, self._dead_of
        self._waiting = ""
        self._loop = asyncio.get_running_loop()
        self._loaded: asyncio.Future[EngineInfo] = self._loop.create_future()
        self._death: asyncio.Future[EngineDeadError] = self._loop.create_future()
        process = self.process
        process.listen(partial(self._receive, process), partial(self._call, self._die, process))
        self.watchdog.watch(process, self._death)
        either: set[asyncio.Future[Any]] = {args, self._loaded}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not self._loaded.done() and not process.is_shared:  # otherwise it has died, or its owner loads it
            process.send(args.result())
        self._info = await self._loaded
        self._is_loaded = True
        return self._info

    def serve(self, vocabulary: TokenTexts) -> None:
        """Accept requests from now on.

        Raises:
            EngineDeadError: it has died since `load` returned.
        """
        if self._dead_of is not None:
            raise type(self._dead_of)(f"the engine died while it loaded: {self._dead_of}")
        self.outputs = OutputProcessor(vocabulary)
        self._serving = True
        self._missing = ()
        self._died_of = None

    @property
    def is_live(self) -> bool:
        """Whether it is neither dead, shut down, stopped nor stuck."""
        return not self.is_dead and not self._closed and self.process.is_running and self._standstill is None

    @property
    def is_dead(self) -> bool:
        """Whether its process is known to be dead and has not been replaced."""
        return self._dead_of is not None or self._waits_for_owner

    @property
    def cause_of_death(self) -> EngineDeadError | None:
        """The reason why its process is dead or abandoned; None: it is not, or has been replaced."""
        return self._dead_of

    @property
    def is_stuck(self) -> bool:
        """Whether its process is stopped or exceeds a timeout of `Watchdog`, and is not known to be dead."""
        return self._dead_of is None and (self.process.is_stopped or self._standstill is not None)

    @property
    def takes_requests(self) -> bool:
        """Whether it is loaded, not known to be dead, and not shut down."""
        return self._serving and not self._closed

    @property
    def is_ready(self) -> bool:
        """Whether it takes requests and is live."""
        return self._serving and self.is_live

    @property
    def status(self) -> str:
        """Text on its current state or the cause of its death."""
        if self._dead_of is not None:
            return f"the engine is dead: {self._dead_of}"
        if self._closed:
            return "the engine is shut down"
        if self._waits_for_owner:
            return f"the engine is dead: {self._died_of}"
        if not self.process.is_running:
            return "the engine's process is stopped or gone"
        if (standstill := self._standstill) is not None:
            return f"the engine is stuck: {standstill}"
        phase = PHASE_LABELS[self.process.status.phase]
        if self._serving:
            return phase
        phase = phase if phase.startswith("loading") else "loading: reading the tokenizer"
        phase = f"loading: {self._waiting}" if self._waiting else phase
        if self._died_of is None:
            return phase
        return f"loading again after: {self._died_of} (now {phase.removeprefix('loading: ')})"

    @property
    def state(self) -> EngineState:
        """State of the engine. Its message changes only with the state, because the operator copies it."""
        info = self._info
        if self.is_ready:
            message = "serving"
        elif self._standstill is not None and not self.is_dead:
            message = "stuck: no progress within the time limit of a step (--step-timeout) or of the server"
        else:
            message = self.status
        return EngineState(
            self.number,
            self.is_ready,
            self.ranks,
            self._missing,
            message,
            None if info is None else info.num_blocks,
            None if info is None else info.kv_tokens,
        )

    async def wait_dead(self) -> EngineDeadError:
        """Wait until the current process is dead, and return the cause. Never returns if `shutdown` is called first."""
        return await asyncio.shield(self._death)

    def die(self, cause: EngineDeadError) -> None:
        """Kill the process, because it cannot serve."""
        self.process.kill(cause)
        self._die(self.process, cause)

    def kill(self, cause: EngineDeadError) -> Coroutine[None, None, None]:
        """Return a coroutine that kills the process, and waits until it is dead. A process that cannot be killed counts
        as dead after a while. The coroutine does not affect a process that replaces the present one before it runs."""
        return self.watchdog.kill(self.process, self._death, cause)

    def watch_if_stopped(self) -> None:
        """Watch the process if it is stopped, even if no request waits for it: new requests go to other engines. If it
        stays stopped, it is killed."""
        if self.takes_requests and self.process.is_stopped:
            self.watchdog.watch(self.process, self._death)

    def shutdown(self) -> None:
        """End requests in flight and loads of adapters with `EngineDeadError`. `close` must follow."""
        self._closed = True
        self.watchdog.stop()
        self._end_streams()

    def close(self) -> None:
        """End the process, or only the link to a shared engine. Called after `shutdown`."""
        self.process.close()

    def begin(self, stream: OutputStream, request: EngineRequest) -> None:
        """Start a request, whose deltas go to `stream`. The caller must call `abort` in the end.

        Raises:
            EngineDeadError: the engine does not take requests. If it dies later, the stream raises this error.
        """
        self.check_serving()
        assert self.outputs is not None
        self.streams[request.id] = stream
        self.outputs.add(request)
        try:
            self.process.send(request)
        except BaseException:
            self.abort(request.id)
            raise
        self.watchdog.watch(self.process, self._death)

    def abort(self, request_id: str) -> None:
        """Abort a request if it is running here, and forget it."""
        if self.streams.pop(request_id, None) is None:
            return
        assert self.outputs is not None
        if self.outputs.forget(request_id):
            self.process.send(Abort(request_id))

    async def load_adapter(self, source: AdapterSource) -> LoadedAdapter:
        """Load a LoRA adapter. The engine must be loaded, but need not serve yet.

        Raises:
            AdapterError: the adapter cannot be loaded.
            EngineDeadError: the engine is dead or shut down, or this happened meanwhile.
        """
        if self._dead_of is not None or self._closed:
            raise EngineDeadError(DEAD)
        ready: asyncio.Future[LoadedAdapter] = self._loop.create_future()
        self._adapter_loads[source.number] = ready
        try:
            self.process.send(LoadAdapter(source))
            self.watchdog.watch(self.process, self._death)
            return await ready
        finally:
            self._adapter_loads.pop(source.number, None)

    def remove_adapter(self, number: int) -> None:
        """Refuse new requests for an adapter; current ones continue. Does nothing while the engine is not loaded: it
        has no adapters then."""
        if self._is_loaded:
            self.process.send(RemoveAdapter(number))

    @property
    def knows_vocabulary(self) -> bool:
        """Whether the process has received the vocabulary, which is required before the first request with a grammar.
        The owner of a shared engine sends it before the engine takes requests."""
        return self.process.is_shared or self._token_table_sent_to is self.process

    def send_token_table(self, table: TokenTable) -> None:
        """Send the vocabulary as bytes to the process."""
        self.process.send(table)
        self._token_table_sent_to = self.process

    def check_serving(self) -> None:
        """Check that the engine takes requests.

        Raises:
            EngineDeadError: the engine does not take requests.
        """
        if not self.takes_requests:
            raise EngineDeadError(DEAD)

    def _receive(self, process: EnginePipe, message: Any) -> None:
        """Process a message of the engine, in the reading thread. An exception here kills the engine."""
        if process is not self.process or self._dead_of is not None:
            return  # the process was abandoned
        if isinstance(message, StepOutputs):
            self._call(self._on_outputs, self._put(process, message.deltas), message)
        elif isinstance(message, AdapterReply):
            self._call(self._resolve_adapter, process, message)
        elif isinstance(message, WaitingForNodes):
            self._call(self._wait_for, process, message.reason)
        elif isinstance(message, MissingRanks):
            self._call(self._on_missing_ranks, process, message)
        elif isinstance(message, LoadFailed):
            self._call(self._resolve_loaded, process, message.error())
        elif isinstance(message, EngineInfo):
            self._call(self._resolve_loaded, process, message)
        else:
            raise TypeError(f"unexpected message {type(message).__name__} from the engine")

    def _put(self, process: EnginePipe, deltas: Sequence[TokenDelta]) -> list[OutputStream]:
        """Put the text of a step's tokens into the streams, and return the streams to wake."""
        assert self.outputs is not None, "the engine has no requests before it is loaded"
        to_wake = []
        for delta in deltas:
            try:
                output, stopped = self.outputs.process(delta)
            except Exception:  # for example in the tokenizer; affects only this request
                logger.exception("the output of request %s could not be converted to text", delta.request_id)
                output, stopped = OutputDelta(delta.request_id, "", finish_reason=FinishReason.ERROR), False
            if stopped:
                process.send(Stop(delta.request_id, delta.index))
            stream = self.streams.get(delta.request_id)
            if output is not None and stream is not None and stream.put(output):
                to_wake.append(stream)
        return to_wake

    def _call(self, function: Callable[..., None], *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            logger.debug("dropped a message of the engine after the event loop was closed")

    def _on_outputs(self, to_wake: Sequence[OutputStream], outputs: StepOutputs) -> None:
        for stream in to_wake:
            stream.wake()
        self._on_step(outputs.deltas, outputs.report)

    def _wait_for(self, process: EnginePipe, reason: str) -> None:
        if process is self.process:
            self._waiting = reason

    def _on_missing_ranks(self, process: EnginePipe, missing: MissingRanks) -> None:
        if process is self.process and self._dead_of is None:
            self._missing = missing.ranks

    def _resolve_loaded(self, process: EnginePipe, result: EngineInfo | Exception) -> None:
        if process is self.process:
            resolve(self._loaded, result)

    def _resolve_adapter(self, process: EnginePipe, reply: AdapterReply) -> None:
        if process is not self.process or (ready := self._adapter_loads.get(reply.number)) is None:
            return
        resolve(ready, AdapterError(reply.error or "") if reply.loaded is None else reply.loaded)

    def _die(self, process: EnginePipe, cause: EngineDeadError) -> None:
        if self._closed or self._dead_of is not None or process is not self.process:
            return
        self._dead_of = cause
        self._serving = self._is_loaded = False
        self._missing = tuple(range(self.ranks))
        level = logging.INFO if process.is_shared else logging.ERROR  # its owner logs the error, once
        logger.log(level, "%s died: %s", self.name or "the engine", cause)
        resolve(self._loaded, type(cause)(f"the engine died while it loaded: {cause}"))
        self._end_streams(type(cause), self._for_clients(cause))
        self._death.set_result(cause)

    def _on_hang(self, process: EnginePipe, cause: EngineDeadError) -> None:
        """Fail the requests of this front end, which hangs and ends; the engine lives on for others."""
        if process is self.process:
            self._end_streams(type(cause), str(cause))

    def _for_clients(self, cause: EngineDeadError) -> str:
        """Return the message for clients. A plain `EngineDeadError` may contain an internal exception, so its text is
        omitted."""
        return DEAD if type(cause) is EngineDeadError else f"{self.name or 'the engine'} has stopped: {cause}"

    def _end_streams(self, kind: type[EngineDeadError] = EngineDeadError, message: str = DEAD) -> None:
        streams, self.streams = self.streams, {}
        for stream in streams.values():
            stream.fail(kind(message))
        for ready in self._adapter_loads.values():
            resolve(ready, kind(message))

    def _has_waiters(self) -> bool:
        return not self._serving or bool(self.streams) or bool(self._adapter_loads) or self.process.is_stopped

    @property
    def _waits_for_owner(self) -> bool:
        """Whether the process of a shared engine is dead, and its owner has not started another one."""
        return self._died_of is not None and self.process.pid is None

    @property
    def _standstill(self) -> str | None:
        return self.watchdog.standstill(self.process)


def resolve(future: asyncio.Future[_T], result: _T | Exception) -> None:
    """Complete a future, unless it is already done."""
    if future.done():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
