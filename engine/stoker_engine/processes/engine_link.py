"""The pipe between an engine and one of several front ends, in the front end. Another process owns the engine."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from multiprocessing.connection import Connection
from typing import ClassVar, Final

from stoker_common.errors import EngineDeadError, EngineStuckError
from stoker_engine.processes.engine_pipe import EnginePipe
from stoker_engine.processes.heartbeat import Heartbeat, Phase

logger = logging.getLogger(__name__)

#: Maximum time between the end of the pipe and the owner's report that the engine is dead, in seconds. It exceeds the
#: time that the owner waits for the process.
_CAUSE_TIMEOUT_S: Final = 30.0


class EngineLink(EnginePipe):
    """A link to the next process of an engine that its owner starts, or a report that there is none now.

    Args:
        fail: ends this front end; called with the reason if the link breaks while the engine lives.
    """

    is_shared: ClassVar[bool] = True

    def __init__(self, fail: Callable[[str], None]) -> None:
        own = Heartbeat()
        own.enter(Phase.WAITING)
        os.close(own.fd)
        super().__init__(own)
        self._fail = fail
        self._linked: Future[None] = Future()
        self._is_closed = False
        self._kill: Callable[[EngineDeadError], None] | None = None
        self._death: Future[EngineDeadError] = Future()

    def connect(
        self,
        pid: int,
        pipe: socket.socket,
        status: Heartbeat,
        kill: Callable[[EngineDeadError], None],
        death: Future[EngineDeadError],
    ) -> None:
        """Connect the link to a process. Called once.

        Args:
            pipe: socket whose other end the process has.
            status: heartbeat of the process.
            kill: asks the owner to kill the process.
            death: gets the cause of the process's death.
        """
        self._connect(pipe)
        self.pid, self.status, self._kill, self._death = pid, status, kill, death
        if not self._linked.set_running_or_notify_cancel():
            pipe.close()
            return
        self._linked.set_result(None)
        death.add_done_callback(lambda _: self._hang_up(pipe))

    def report_dead(self, cause: EngineDeadError) -> None:
        """Report that the newest process is already dead. Called instead of `connect`."""
        self._death.set_result(cause)
        if self._linked.set_running_or_notify_cancel():
            self._linked.set_result(None)

    def kill(self, because: EngineDeadError) -> None:
        """Ask the owner to kill the process."""
        if self._kill is not None:  # otherwise there is no process yet
            self._kill(because)

    def fail(self, cause: EngineDeadError) -> None:
        """End this front end: the engine serves others."""
        self._fail(f"the link to an engine is broken: {cause}")

    def close(self) -> None:
        """Close the link: the engine aborts its requests."""
        self._is_closed = True
        self._linked.cancel()
        self.ask_to_end()
        if self._socket is not None:
            self._hang_up(self._socket)
            self._socket.close()

    def _hang_up(self, pipe: socket.socket) -> None:
        """End the reading thread after the messages that have arrived: a process that cannot be killed keeps the pipe
        open, although its owner has abandoned it."""
        with contextlib.suppress(OSError):  # it is closed already
            pipe.shutdown(socket.SHUT_RDWR)

    def _connected(self) -> Connection | None:
        try:
            self._linked.result()
        except CancelledError:
            return None
        return self._connection

    def _wait(self) -> EngineDeadError:
        if self._is_closed:
            return EngineDeadError("the link is closed")
        try:
            return self._death.result(_CAUSE_TIMEOUT_S)
        except TimeoutError:
            self._fail("the link to an engine was closed, and the engine lives")
            return EngineStuckError("its link was closed")
