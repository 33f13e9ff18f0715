"""The handle of an engine process in its parent, the server or a script: start, messages, state, and termination."""

from __future__ import annotations

import logging
import os
import pickle
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, Final

from stoker_common.errors import EngineDeadError, EngineStuckError
from stoker_common.subprocesses.death import Died, cause_of_death, is_stopped, process_state
from stoker_common.subprocesses.lifeline import parent_for_child
from stoker_common.subprocesses.oom_kills import oom_kills
from stoker_engine.processes.heartbeat import Heartbeat, Phase

logger = logging.getLogger(__name__)

#: Arguments of the interpreter. `-P` prevents imports from the working directory.
PROGRAM: Final = ("-P", "-m", "stoker_engine.processes.main")

#: Time for an engine to end on request, and again after a kill, in seconds.
_CLOSE_TIMEOUT_S: Final = 5


class EngineProcess:
    """One engine process. It starts immediately, so that importing torch overlaps with the server's own start.

    Args:
        log_format: see `logs.configure`.
        program: interpreter arguments of the program; tests replace it.
        step_timeout: see `exec.supervision`.
        engine: index of the engine; None: the only one.

    Raises:
        OSError: the system has no processes or memory left.
    """

    def __init__(
        self,
        log_format: str = "text",
        program: Sequence[str] = PROGRAM,
        step_timeout: float = 300.0,
        engine: int | None = None,
    ) -> None:
        self.status = Heartbeat()
        self.status.enter(Phase.STARTING)
        self._socket, child_socket = socket.socketpair()
        self._connection = Connection(os.dup(self._socket.fileno()))
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._reading_since: float | None = None
        self._handling_since: float | None = None
        self._killed_because: EngineDeadError | None = None
        self._died: Died | None = None
        self._oom_kills = oom_kills()
        try:
            with child_socket:
                self._process = subprocess.Popen(
                    [
                        sys.executable,
                        *program,
                        str(child_socket.fileno()),
                        str(self.status.fd),
                        log_format,
                        str(parent_for_child()),
                        str(step_timeout),
                        "" if engine is None else str(engine),
                    ],
                    pass_fds=(child_socket.fileno(), self.status.fd),
                    process_group=0,  # this process handles Ctrl-C in a terminal, and ends the engine itself
                )
        finally:
            os.close(self.status.fd)  # the memory exists as long as one of the processes maps it
        self.pid: int = self._process.pid

    def listen(self, on_message: Callable[[Any], None], on_death: Callable[[EngineDeadError], None]) -> None:
        """Start the threads that read and write the pipe.

        Args:
            on_message: called in the reading thread with each message but `Died`. If it raises, the engine is killed.
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

    def _state(self) -> bytes:
        """Return the process state as in Linux's /proc; X also if the process does not exist. Other systems: R or X."""
        state = process_state(self.pid)
        if state is None:
            return b"R" if sys.platform != "linux" and self._process.poll() is None else b"X"
        return state

    def kill(self, because: EngineDeadError) -> None:
        """Kill the process in any state. The first call's `because` is reported as its cause of death."""
        self._killed_because = self._killed_because or because
        self._process.kill()

    def ask_to_end(self) -> None:
        """Ask the engine to end, without waiting."""
        self._outbox.put(None)
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            logger.debug("the engine has already ended")

    def close(self) -> None:
        """Ask the engine to end, wait until it has, and kill it after a timeout."""
        self.ask_to_end()
        try:
            self._process.wait(_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill(EngineStuckError("it did not end when asked to"))
            try:
                self._process.wait(_CLOSE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                logger.error("the engine process %d cannot be killed, and is left behind", self.pid)
        self._socket.close()

    def _read(self, on_message: Callable[[Any], None], on_death: Callable[[EngineDeadError], None]) -> None:
        try:
            try:
                self._handle_messages(on_message)
            except BaseException as error:  # callers that wait for an answer must get an error
                logger.exception("a message of the engine cannot be handled")
                self.kill(EngineDeadError(f"its message could not be handled: {type(error).__name__}: {error}"))
            cause = self._wait()
        except BaseException as error:
            cause = EngineDeadError(f"how it ended is not known: {type(error).__name__}: {error}")
        self._outbox.put(None)
        on_death(cause)

    def _handle_messages(self, on_message: Callable[[Any], None]) -> None:
        """Handle messages until the pipe is closed."""
        while True:
            self._handling_since, self._reading_since = None, time.monotonic()
            try:
                data = self._connection.recv_bytes()
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
            while (data := self._outbox.get()) is not None:
                self._connection.send_bytes(data)
        except (BrokenPipeError, ConnectionResetError):  # it is dead, which the reading thread reports
            return
        except BaseException as error:
            logger.exception("the engine cannot be written to")
            self.kill(EngineDeadError(f"it could not be written to: {type(error).__name__}: {error}"))

    def _wait(self) -> EngineDeadError:
        """Wait for the end of a process whose pipe is closed, kill it if necessary, and return the cause of death."""
        try:
            return self._cause(self._process.wait(_CLOSE_TIMEOUT_S))
        except subprocess.TimeoutExpired:  # still alive, but useless without a pipe
            self.kill(EngineDeadError("it closed its pipe"))
        try:
            return self._cause(self._process.wait(_CLOSE_TIMEOUT_S))
        except subprocess.TimeoutExpired:
            return EngineStuckError("it cannot be killed")

    def _cause(self, code: int) -> EngineDeadError:
        if self._killed_because is not None:
            return self._killed_because
        return cause_of_death(code, self._died, oom_kills() > self._oom_kills)
