"""The supervisor of several front ends: the process of ``stoker serve`` if ``--api-server-count`` is above 1.

It owns the engines, and restarts them as a server with one front end does. Requests and tokens do not pass it: each
front end has a pipe to each engine. A front end that ends is replaced, while the others go on.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, Final

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, generate_latest

from stoker_common.errors import StokerError
from stoker_engine.async_llm import AsyncLLM
from stoker_engine.contract.serve_args import ServeArgs
from stoker_engine.core.engine_info import EngineInfo
from stoker_engine.server.engine.engine_keeper import EngineKeeper
from stoker_engine.server.engine.peers import SharedCounts
from stoker_engine.server.engine.restarts import Restarts
from stoker_engine.server.front_ends.control import (
    Call,
    Failed,
    FilesFound,
    KillEngine,
    Ready,
    Rejected,
    Reply,
    Start,
)
from stoker_engine.server.front_ends.engine_links import EngineLinks
from stoker_engine.server.front_ends.front_end_process import FrontEndProcess
from stoker_engine.server.front_ends.metrics_folder import metrics_folder
from stoker_engine.server.front_ends.process_metrics import ProcessesCollector
from stoker_engine.server.http.http_server import log_ready, url_of
from stoker_engine.server.observability.engine_records import EngineRecords
from stoker_engine.server.observability.request_log import RequestLog
from stoker_engine.server.responses.shared_store import response_store

logger = logging.getLogger(__name__)

#: Maximum number of front ends that are replaced per hour, and before all have been ready once. After that the server
#: ends.
MAX_REPLACED: Final = 10
MAX_REPLACED_AT_START: Final = 3
_HOUR_S: Final = 3600.0

#: Interval of the checks whether front ends hang, in seconds.
_CHECK_S: Final = 5.0

#: Time for front ends to end, after they have been asked to end at once, in seconds.
_END_TIMEOUT_S: Final = 15.0


def supervise(args: ServeArgs, bound: socket.socket) -> None:
    """Serve on a socket from `bind` with several front ends, until SIGTERM, SIGINT or an error.

    Raises:
        ArgumentError, ModelError: the engine cannot be loaded, or a file that the server needs cannot be read.
        EngineDeadError: an engine's death ended the server.
        StokerError: front ends ended too often, or cannot be started.
    """
    engines = EngineLinks(args)
    client = AsyncLLM(
        args.engine,
        chat_template=args.frontend.chat_template,
        step_timeout=args.frontend.step_timeout,
        log_format=args.frontend.log_format,
        start=engines.start,
    )
    try:
        with metrics_folder() as metrics:
            asyncio.run(Supervisor(args, bound, client, engines, metrics).run())
    finally:
        client.shutdown()


class Supervisor:
    """The supervisor, for one event loop.

    Args:
        metrics: folder of the front ends' HTTP metrics.
    """

    def __init__(
        self, args: ServeArgs, bound: socket.socket, client: AsyncLLM, engines: EngineLinks, metrics: Path
    ) -> None:
        self._args, self._bound, self._client, self._engines, self._metrics = args, bound, client, engines, metrics
        count = args.frontend.api_server_count
        self._counts = SharedCounts(count)
        self._registry = CollectorRegistry()
        self._registry.register(ProcessesCollector(self._pids))
        PlatformCollector(registry=self._registry)
        GCCollector(registry=self._registry)
        self._records = EngineRecords(args, client, self._registry, RequestLog(False, None))
        self._responses = response_store(args.frontend)
        self._front_ends: dict[int, FrontEndProcess] = {}  # by index
        self._num_started = 0
        self._created = int(time.time())
        self._min_engines = args.engine.data_parallel_size
        self._replaced: deque[float] = deque()
        self._all_ready = asyncio.Event()
        self._all_ended = asyncio.Event()
        self._stopping = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Serve until a signal or an error.

        Raises:
            StokerError: see `supervise`.
        """
        loop = asyncio.get_running_loop()
        self._failure: asyncio.Future[None] = loop.create_future()
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, self._stop, signum)
        engines = asyncio.create_task(self._keep_engines())
        checks = asyncio.create_task(self._check_front_ends())
        stopping = asyncio.create_task(self._stopping.wait())
        ended = asyncio.create_task(self._all_ended.wait())
        try:
            for index in range(self._args.frontend.api_server_count):
                self._start_or_fail(index)
            failures: set[asyncio.Future[Any]] = {engines, self._failure}
            await asyncio.wait({*failures, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if self._stopping.is_set():
                await asyncio.wait({*failures, ended}, return_when=asyncio.FIRST_COMPLETED)
            for failure in (self._failure, engines):
                if failure.done():
                    failure.result()
        finally:
            for task in (engines, checks, stopping):
                task.cancel()
            self._stopping.set()
            await self._end_front_ends(ended)

    def _pids(self) -> list[int]:
        """Return the ids of the server's own processes. Thread-safe."""
        return [os.getpid(), *(front_end.pid for front_end in list(self._front_ends.values()))]

    def _stop(self, signum: int) -> None:
        """Pass a signal to all front ends, each of which drains, or ends at once at the second signal."""
        self._stopping.set()
        for front_end in self._front_ends.values():
            front_end.stop(signum)
        self._check_ended()

    async def _keep_engines(self) -> None:
        """Load the engines, and restart them when they die; raise the error that ends the server."""
        client, frontend = self._client, self._args.frontend
        info = await client.load()
        self._min_engines = 1  # from now on, engines may stay dead
        self._records.on_loaded(info)
        for engine in range(client.num_engines):
            self._engines.serve(engine)
        announcing = asyncio.create_task(self._announce(info))  # an engine may die before all front ends are ready
        restarts = [Restarts(frontend.max_engine_restarts) for _ in range(client.num_engines)]
        try:
            await EngineKeeper(client, restarts, self).keep()
        finally:
            announcing.cancel()

    async def _announce(self, info: EngineInfo) -> None:
        """Report that the server is ready, once all front ends are."""
        await self._all_ready.wait()
        self._counts.start()
        log_ready(info, self._args.model_names, url_of(self._args, self._bound))

    def on_death(self, engine: int) -> None:
        """Record the death of an engine, and report it to front ends, which do not notice if one is abandoned."""
        if (cause := self._client.engines[engine].cause_of_death) is not None:
            self._engines.report_dead(engine, cause)
        self._records.on_death(engine)

    def on_restart(self, engine: int) -> None:
        """Record the start of a restart."""
        self._records.on_restart(engine)

    def on_loaded_again(self, engine: int) -> None:
        """Let front ends use a restarted engine."""
        self._engines.serve(engine)
        self._records.on_loaded_again(engine)

    def _start_or_fail(self, index: int) -> None:
        """Start a front end; if that is impossible, end the server."""
        try:
            self._start(index)
        except OSError as error:
            self._fail(StokerError(f"a front end cannot be started: {error.strerror}"))

    def _start(self, index: int) -> None:
        """Start a front end.

        Raises:
            OSError: the system has no processes, memory or descriptors left.
        """
        loop = asyncio.get_running_loop()

        def in_loop(function: Any) -> Any:
            return partial(loop.call_soon_threadsafe, function)

        start = Start(self._args, index, str(self._num_started), self._created, self._min_engines)
        front_end = FrontEndProcess(start, self._bound, self._counts.fd, self._metrics)
        self._num_started += 1
        self._front_ends[index] = front_end
        self._engines.add(front_end)
        self._client.files.add_done_callback(
            lambda files: None if files.exception() else front_end.send(FilesFound(files.result()))
        )
        front_end.listen(in_loop(partial(self._on_message, front_end)), in_loop(partial(self._on_exit, front_end)))

    def _on_message(self, front_end: FrontEndProcess, message: Any) -> None:
        if isinstance(message, Call):
            self._spawn(self._answer(front_end, message))
        elif isinstance(message, Rejected):
            self._records.on_rejected(message.limit)
        elif isinstance(message, Ready):
            front_end.is_ready = True
            if self._all_ready.is_set():
                logger.info("front end %d serves again", front_end.index)
            elif all(each.is_ready for each in self._front_ends.values()):
                self._all_ready.set()
        elif isinstance(message, KillEngine):
            if self._engines.is_newest(message.engine, message.serial):
                kill = self._client.engines[message.engine].kill(message.cause)  # of this process, not of a later one
                self._spawn(kill)
        elif isinstance(message, Failed):
            front_end.failure = message.error.error()
        else:
            front_end.is_answering()

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, front_end: FrontEndProcess, call: Call) -> None:
        try:
            front_end.send(Reply(call.number, await self._do(call.method, *call.arguments)))
        except StokerError as error:
            front_end.send(Reply(call.number, None, error))
        except Exception:
            logger.exception("%s failed for a front end", call.method)
            front_end.send(Reply(call.number, None, StokerError("the server failed; see its log")))

    async def _do(self, method: str, *arguments: Any) -> Any:
        if method == "metrics":
            return await asyncio.to_thread(generate_latest, self._registry)
        if method == "engine_states":
            return self._client.engine_states
        responses = self._responses
        methods: dict[str, Callable[..., Any]] = {
            "put_response": responses.put,
            "get_response": responses.get,
            "delete_response": responses.delete,
        }
        return methods[method](*arguments)

    def _on_exit(self, front_end: FrontEndProcess, cause: str) -> None:
        """Replace a front end that has ended."""
        self._engines.remove(front_end)
        self._counts.show(front_end.index, 0, 0, 0)
        del self._front_ends[front_end.index]
        if self._stopping.is_set():
            self._check_ended()
            return
        failure = front_end.failure
        if failure is not None and not self._all_ready.is_set():
            self._fail(failure)  # the others would fail, too
            return
        logger.error("front end %d ended: %s", front_end.index, failure or cause)
        now = time.monotonic()
        while self._replaced and self._replaced[0] <= now - _HOUR_S:
            self._replaced.popleft()
        if len(self._replaced) >= (MAX_REPLACED if self._all_ready.is_set() else MAX_REPLACED_AT_START):
            self._fail(StokerError(f"front ends ended too often; the last one: {failure or cause}"))
            return
        self._replaced.append(now)
        logger.warning("starting another front end %d; the others go on", front_end.index)
        self._start_or_fail(front_end.index)

    def _fail(self, error: StokerError) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)

    def _check_ended(self) -> None:
        if not self._front_ends:
            self._all_ended.set()

    async def _check_front_ends(self) -> None:
        """Kill front ends that are stopped or whose event loop hangs, so that they are replaced."""
        while True:
            await asyncio.sleep(_CHECK_S)
            for front_end in self._front_ends.values():
                front_end.check()

    async def _end_front_ends(self, ended: asyncio.Task[bool]) -> None:
        """End all front ends at once, and wait until they have ended."""
        for front_end in self._front_ends.values():
            front_end.end()
        self._check_ended()
        await asyncio.wait({ended}, timeout=_END_TIMEOUT_S)
        for front_end in self._front_ends.values():
            front_end.kill()
        await asyncio.wait({ended}, timeout=_END_TIMEOUT_S)
        ended.cancel()
