"""Links every front end to the current process of every engine."""

from __future__ import annotations

import logging
import pickle
import socket
import threading
from functools import partial
from typing import Protocol

from stoker_common.errors import EngineDeadError
from stoker_engine.contract.serve_args import ServeArgs
from stoker_engine.processes.engine_process import PROGRAM, EngineProcess
from stoker_engine.processes.messages import ServeFrontEnds
from stoker_engine.server.front_ends.control import EngineDied, EngineLinked

logger = logging.getLogger(__name__)


class Linked(Protocol):
    """A front end.

    Attributes:
        links: socket over which it receives links.
    """

    links: socket.socket

    def send(self, message: object) -> None:
        """Send a message of `control`."""
        ...


class EngineLinks:
    """The engines' processes, children of this process, and the front ends that are linked to them. Thread-safe."""

    def __init__(self, args: ServeArgs) -> None:
        self._args = args
        self._lock = threading.Lock()
        self._front_ends: list[Linked] = []
        self._processes: dict[int, tuple[int, EngineProcess]] = {}  # by engine: serial number, newest process
        self._dead: dict[int, EngineDied] = {}  # by engine: death of its newest process

    def start(self, engine: int) -> EngineProcess:
        """Start a process of an engine, and link it to all front ends. The death of the previous one has been reported.

        Raises:
            OSError: the system has no processes or memory left.
        """
        frontend, several = self._args.frontend, self._args.engine.data_parallel_size > 1
        with self._lock:
            serial = self._processes[engine][0] + 1 if engine in self._processes else 0
            process = EngineProcess(
                frontend.log_format,
                PROGRAM,
                frontend.step_timeout,
                engine if several else None,
                partial(self._on_death, engine, serial),
            )
            self._processes[engine] = serial, process
            self._dead.pop(engine, None)
            for front_end in self._front_ends:
                self._link(front_end, engine)
        return process

    def serve(self, engine: int) -> None:
        """Let front ends send requests to a loaded engine."""
        self._processes[engine][1].send(ServeFrontEnds())

    def report_dead(self, engine: int, cause: EngineDeadError) -> None:
        """Report to all front ends that an engine's newest process is dead, or abandoned because it cannot be killed.
        A death that is known already is not reported again."""
        with self._lock:
            self._report(engine, cause)

    def add(self, front_end: Linked) -> None:
        """Link a front end to all engines, and from now on to their successors."""
        with self._lock:
            self._front_ends.append(front_end)
            for engine in self._processes:
                self._link(front_end, engine)

    def remove(self, front_end: Linked) -> None:
        """Forget a front end that has ended. Its links are closed, so engines abort its requests."""
        with self._lock:
            self._front_ends.remove(front_end)

    def is_newest(self, engine: int, serial: int) -> bool:
        """Whether no other process of the engine has replaced this one."""
        with self._lock:
            return self._processes[engine][0] == serial

    def _link(self, front_end: Linked, engine: int) -> None:
        serial, process = self._processes[engine]
        try:
            if engine in self._dead:
                front_end.links.send(pickle.dumps(self._dead[engine]))
                return
            ours, theirs = socket.socketpair()
            with ours, theirs:
                process.link(ours)
                header = pickle.dumps(EngineLinked(engine, serial, process.pid))
                socket.send_fds(front_end.links, [header], [theirs.fileno(), process.status.fd])
        except OSError:
            logger.debug("a front end has ended, and gets no engine")

    def _on_death(self, engine: int, serial: int, _: EngineProcess, cause: EngineDeadError) -> None:
        """Report a death to all front ends, in the thread that reads the engine's pipe."""
        with self._lock:
            if self._processes[engine][0] == serial:  # otherwise it was abandoned
                self._report(engine, cause)

    def _report(self, engine: int, cause: EngineDeadError) -> None:
        """See `report_dead`."""
        if engine not in self._dead:
            death = self._dead[engine] = EngineDied(engine, self._processes[engine][0], cause)
            for front_end in self._front_ends:
                front_end.send(death)
