"""A front end's view of its supervisor: its `Peers`, and the source of its links to engines."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import pickle
import signal
import socket
import struct
import threading
from collections import defaultdict, deque
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from stoker_common.errors import EngineDeadError, StokerError
from stoker_common.subprocesses.load_failed import LoadFailed
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.processes.engine_link import EngineLink
from stoker_engine.processes.heartbeat import Heartbeat
from stoker_engine.server.engine.peers import SharedCounts
from stoker_engine.server.front_ends.control import (
    Call,
    ControlPipe,
    End,
    EngineDied,
    EngineLinked,
    Failed,
    FilesFound,
    KillEngine,
    Ping,
    Pong,
    Ready,
    Rejected,
    Reply,
    Start,
)

logger = logging.getLogger(__name__)

#: Maximum size of the message with a link, or the cause of an engine's death.
_MAX_HEADER_BYTES: Final = 1 << 18


@dataclass(frozen=True)
class _Process:
    """A process of an engine, to which an `EngineLink` can be connected."""

    linked: EngineLinked
    pipe: socket.socket
    status: Heartbeat


class Supervised:
    """The supervisor, for a front end; implements `Peers`. This process ends with its supervisor.

    Args:
        control: pipe to the supervisor.
        links: socket over which links to engines come.
        counts: descriptor of the `SharedCounts`.

    Attributes:
        start: what this front end serves.
        files: the engine's arguments with the path of the model's files, once they are found.
    """

    def __init__(self, control: ControlPipe, links: socket.socket, counts: int) -> None:
        start = control.receive()
        assert isinstance(start, Start)
        self.start = start
        self.index, self.name, self.created = start.index, start.name, start.created
        self.counts = SharedCounts(start.args.frontend.api_server_count, counts)
        self.files: Future[EngineArgs] = Future()
        self._control, self._links = control, links
        self._numbers = itertools.count()
        self._calls: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._waiting: dict[int, EngineLink] = {}  # by engine
        self._processes: defaultdict[int, deque[_Process | EngineDied]] = defaultdict(deque)  # not linked yet
        self._deaths: defaultdict[tuple[int, int], Future[EngineDeadError]] = defaultdict(Future)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._fails = False
        control.listen(self._on_message, self._die)
        threading.Thread(target=self._receive_links, name="links", daemon=True).start()

    def link(self, engine: int) -> EngineLink:
        """Return a link to the next process of an engine; see `AsyncLLM`."""
        link = EngineLink(self._fail)
        with self._lock:
            self._waiting[engine] = link
            self._match(engine)
        return link

    def on_loop_running(self) -> None:
        """Answer the supervisor's questions in the event loop from now on."""
        self._loop = asyncio.get_running_loop()

    def on_ready(self) -> None:
        """Report that this front end serves."""
        self._control.send(Ready())

    def on_rejected(self, limit: str) -> None:
        """Count a request that was rejected by a queue limit."""
        self._control.send(Rejected(limit))

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the supervisor.

        Raises:
            StokerError: the method raised it.
        """
        number, future = next(self._numbers), Future[Any]()
        self._calls[number] = future
        try:
            self._control.send(Call(number, method, arguments))
            return await asyncio.wrap_future(future)
        finally:
            del self._calls[number]

    async def metrics(self) -> bytes:
        """Return the supervisor's metrics of the engines, and the sums of all front ends' HTTP metrics, also of those
        that have ended: prometheus_client keeps them in files."""
        engines, http = await asyncio.gather(self.call("metrics"), asyncio.to_thread(_http_metrics))
        return bytes(engines) + http

    def report_failure(self, error: StokerError) -> None:
        """Report the error that ends this front end, and wait until the report is sent."""
        self._control.send(Failed(LoadFailed.of(error)))
        self._control.flush()

    def _on_message(self, message: Any) -> None:
        """Handle a message of the supervisor, in the reading thread."""
        if isinstance(message, Reply):
            if (future := self._calls.get(message.number)) is None or not future.set_running_or_notify_cancel():
                return
            if message.error is None:
                future.set_result(message.value)
            else:
                future.set_exception(message.error)
        elif isinstance(message, EngineDied):
            with self._lock:
                self._deaths[message.engine, message.serial].set_result(message.cause)
        elif isinstance(message, FilesFound):
            self.files.set_result(message.args)
        elif isinstance(message, Ping):
            if self._loop is not None:  # otherwise this front end starts
                with contextlib.suppress(RuntimeError):  # the loop is closed: this front end ends
                    self._loop.call_soon_threadsafe(self._control.send, Pong())
        elif isinstance(message, End):
            for _ in range(2):  # `os.kill` would merge two pending signals
                signal.raise_signal(signal.SIGINT)
        else:
            raise TypeError(f"unexpected message {type(message).__name__} from the supervisor")

    def _receive_links(self) -> None:
        while True:
            header, descriptors, _, _ = socket.recv_fds(self._links, _MAX_HEADER_BYTES, 2)
            if not header:
                return
            message: EngineLinked | EngineDied = pickle.loads(header)
            if isinstance(message, EngineDied):
                process: _Process | EngineDied = message
            else:
                process = _Process(message, socket.socket(fileno=descriptors[0]), Heartbeat(descriptors[1]))
                os.close(descriptors[1])
            with self._lock:
                self._processes[message.engine].append(process)
                self._match(message.engine)

    def _match(self, engine: int) -> None:
        """Connect the waiting link of an engine to its next process, if both exist."""
        processes = self._processes[engine]
        if engine not in self._waiting or not processes:
            return
        process, link = processes.popleft(), self._waiting.pop(engine)
        if isinstance(process, EngineDied):
            link.report_dead(process.cause)
        else:
            serial = process.linked.serial
            kill, death = partial(self._kill, engine, serial), self._deaths[engine, serial]
            link.connect(process.linked.pid, process.pipe, process.status, kill, death)

    def _kill(self, engine: int, serial: int, cause: EngineDeadError) -> None:
        self._control.send(KillEngine(engine, serial, cause))

    def _fail(self, reason: str) -> None:
        """End this front end, which its supervisor replaces. Another call does nothing: a second signal would end the
        requests in flight. `Failed` is not sent: other front ends need not fail, too."""
        with self._lock:
            if self._fails:
                return
            self._fails = True
        logger.error("this front end ends: %s", reason)
        os.kill(os.getpid(), signal.SIGTERM)

    def _die(self) -> None:
        os._exit(0)


def _http_metrics() -> bytes:
    registry = CollectorRegistry()
    MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    try:
        return generate_latest(registry)
    except struct.error:  # a front end that starts has created its file, and not filled it yet
        return generate_latest(registry)
