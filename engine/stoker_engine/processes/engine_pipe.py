"""One end of the pipe of an engine process: messages in both directions, and the observed state of the process.

`EngineProcess` is the end of the process's parent. `EngineLink` is the end of a front end whose server has several.
"""

from __future__ import annotations

import logging
import os
import pickle
import queue
import socket
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, ClassVar

from stoker_common.errors import EngineDeadError
from stoker_common.subprocesses.death import Died, is_stopped, process_state
from stoker_engine.processes.heartbeat import Heartbeat, Phase

logger = logging.getLogger(__name__)


class EnginePipe(ABC):
    """An end of the pipe.

    Attributes:
        is_shared: whether another process owns the engine: it loads, kills and restarts the engine, and sends it the
            vocabulary.
        status: the process's heartbeat.
        pid: its process id; None while it is not known.
    """

    is_shared: ClassVar[bool]

    def __init__(self, status: Heartbeat) -> None:
        self.status = status
        self.pid: int | None = None
        self._socket: socket.socket | None = None
        self._connection: Connection | None = None
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._reading_since: float | None = None
        self._handling_since: float | None = None
        self._died: Died | None = None

    def listen(self, on_message: Callable[[Any], None], on_death: Callable[[EngineDeadError], None]) -> None:
        """Start the threads that read and write the pipe.

        Args:
            on_message: called in the reading thread with each message but `Died`. If it raises, `fail` is called.
            on_death: called exactly once in the reading thread, at its end, with the cause of the engine's death.
        """
        threading.Thread(target=self._read, args=(on_message, on_death), name="from-engine", daemon=True).start()
        threading.Thread(target=self._write, name="to-engine", daemon=True).start()

    def send(self, message: Any) -> None:
        """Send a message without waiting; messages to a dead engine are lost.

        Raises:
            Exception: the message cannot be pickled; nothing is sent, and other messages are not affected.
        """
        self._outbox.put(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    @property
    def is_running(self) -> bool:
        """Whether the process is alive and not stopped."""
        return self._state() not in (b"T", b"t", b"Z", b"X", b"x")

    @property
    def is_stopped(self) -> bool:
        """Whether the process is alive but stopped (SIGSTOP or a debugger)."""
        return is_stopped(self._state())

    @property
    def busy_for(self) -> float:
        """Seconds since the engine's current work started or made progress (`Heartbeat.busy_for`); 0 while it waits.
        The engine cannot finish sending while this side does not read, so its time of sending is limited to the time of
        the current read."""
        busy_for, reading_since = self.status.busy_for, self._reading_since
        if self.status.phase is not Phase.SENDING:
            return busy_for
        return 0.0 if reading_since is None else min(busy_for, time.monotonic() - reading_since)

    @property
    def handling_for(self) -> float:
        """Seconds since this side started to handle a message of the engine; 0 while it waits for the next one."""
        since = self._handling_since
        return 0.0 if since is None else time.monotonic() - since

    @abstractmethod
    def kill(self, because: EngineDeadError) -> None:
        """Kill the process in any state. The first call's `because` is reported as its cause of death."""

    @abstractmethod
    def fail(self, cause: EngineDeadError) -> None:
        """Handle an error at this end, after which the pipe cannot be used."""

    @abstractmethod
    def close(self) -> None:
        """End the use of the pipe. May be called repeatedly."""

    def ask_to_end(self) -> None:
        """Send no more messages, without waiting. The engine then ends, or aborts this front end's requests."""
        self._outbox.put(None)
        try:
            if self._socket is not None:
                self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            logger.debug("the engine has already ended")

    @abstractmethod
    def _connected(self) -> Connection | None:
        """Wait for the connection; None: this end is closed."""

    @abstractmethod
    def _wait(self) -> EngineDeadError:
        """Wait for the end of a process whose pipe is closed, and return the cause of its death."""

    def _state(self) -> bytes:
        """Return the process state as in Linux's /proc; X also if the process does not exist. Other systems: R or X."""
        if self.pid is None:
            return b"R"
        state = process_state(self.pid)
        if state is None:
            return b"R" if sys.platform != "linux" and self._is_alive() else b"X"
        return state

    def _is_alive(self) -> bool:
        """Whether the process has not ended, on systems without /proc."""
        return True

    def _read(self, on_message: Callable[[Any], None], on_death: Callable[[EngineDeadError], None]) -> None:
        try:
            try:
                self._handle_messages(on_message)
            except BaseException as error:  # callers that wait for an answer must get an error
                logger.exception("a message of the engine cannot be handled")
                self.fail(EngineDeadError(f"its message could not be handled: {type(error).__name__}: {error}"))
            cause = self._wait()
        except BaseException as error:
            cause = EngineDeadError(f"how it ended is not known: {type(error).__name__}: {error}")
        self._outbox.put(None)
        on_death(cause)

    def _handle_messages(self, on_message: Callable[[Any], None]) -> None:
        """Handle messages until the pipe is closed."""
        connection = self._connected()
        while connection is not None:
            self._handling_since, self._reading_since = None, time.monotonic()
            try:
                data = connection.recv_bytes()
            except (EOFError, OSError):  # also in the middle of a message
                return
            self._handling_since, self._reading_since = time.monotonic(), None
            message = pickle.loads(data)
            if isinstance(message, Died):
                self._died = message
            else:
                on_message(message)

    def _write(self) -> None:
        try:
            connection = self._connected()
            while connection is not None and (data := self._outbox.get()) is not None:
                connection.send_bytes(data)
        except (BrokenPipeError, ConnectionResetError):  # it is dead, which the reading thread reports
            return
        except BaseException as error:
            logger.exception("the engine cannot be written to")
            self.fail(EngineDeadError(f"it could not be written to: {type(error).__name__}: {error}"))

    def _connect(self, pipe: socket.socket) -> None:
        self._socket = pipe
        self._connection = Connection(os.dup(pipe.fileno()))
