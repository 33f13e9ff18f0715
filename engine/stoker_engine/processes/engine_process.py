"""The engine process as the server sees it: started, written to, listened to, looked at, killed."""

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

#: What runs in the process. `-P`: what lies in the working directory is not imported.
PROGRAM: Final = ("-P", "-m", "stoker_engine.processes.main")

#: Seconds an engine that is asked to end may take, and one that is killed.
_CLOSE_TIMEOUT_S: Final = 5


class EngineProcess:
    """One engine process. It starts at once: importing torch overlaps with all that the server has to do.

    Args:
        log_format: see `logs.configure`.
        program: interpreter arguments of what runs; tests bring their own.
        step_timeout: seconds after which its ranks are stuck, if it has some; see `exec.supervision`.
        engine: which of the model's engines it is; None: the only one.

    Raises:
        OSError: the system has no process or memory left for it.
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
                    process_group=0,  # Ctrl-C in a terminal is for the server, which ends the engine in its own time
                )
        finally:
            os.close(self.status.fd)  # the memory stays, for as long as one of the two looks at it
        self.pid: int = self._process.pid

    def listen(self, on_message: Callable[[Any], None], on_death: Callable[[EngineDeadError], None]) -> None:
        """Starts the threads that read and write the pipe.

        Args:
            on_message: called in the reading thread, with each message. What it raises is the engine's death.
            on_death: called in it once, last and whatever happens, with the sentence that says of what the engine died.
        """
        threading.Thread(target=self._read, args=(on_message, on_death), name="from-engine", daemon=True).start()
        threading.Thread(target=self._write, name="to-engine", daemon=True).start()

    def send(self, message: Any) -> None:
        """Sends a message, without waiting; to a dead engine it is lost.

        Raises:
            Exception: it cannot be pickled. Nothing is sent then, and others are not hurt.
        """
        self._outbox.put(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    @property
    def is_running(self) -> bool:
        """Whether the process lives and is not stopped, right now."""
        return self._state() not in (b"T", b"t", b"Z", b"X", b"x")

    @property
    def is_stopped(self) -> bool:
        """Whether the process lives and is stopped (SIGSTOP, a debugger, a frozen container), right now."""
        return is_stopped(self._state())

    @property
    def busy_for(self) -> float:
        """Seconds since the engine began what must come to an end by itself; 0 where it waits. It cannot end sending
        while this side does not read, so that counts only from when this side does."""
        busy_for, reading_since = self.status.busy_for, self._reading_since
        if self.status.phase is not Phase.SENDING:
            return busy_for
        return 0.0 if reading_since is None else min(busy_for, time.monotonic() - reading_since)

    @property
    def handling_for(self) -> float:
        """Seconds since this side began to handle one message of the engine; 0 while it waits for the next."""
        since = self._handling_since
        return 0.0 if since is None else time.monotonic() - since

    def _state(self) -> bytes:
        """The process's state as Linux writes it; X also where there is none any more."""
        state = process_state(self.pid)
        if state is None:
            return b"R" if sys.platform != "linux" and self._process.poll() is None else b"X"
        return state

    def kill(self, because: EngineDeadError) -> None:
        """Ends the process, whatever it does; `because` is what it died of then."""
        self._killed_because = self._killed_because or because
        self._process.kill()

    def ask_to_end(self) -> None:
        """Asks the engine to end, without waiting."""
        self._outbox.put(None)
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            logger.debug("the engine is gone already")

    def close(self) -> None:
        """Asks the engine to end, and waits until it has."""
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
            except BaseException as error:  # whoever waits for an answer must hear that there will be none
                logger.exception("a message of the engine cannot be handled")
                self.kill(EngineDeadError(f"its message could not be handled: {type(error).__name__}: {error}"))
            cause = self._wait()
        except BaseException as error:
            cause = EngineDeadError(f"how it ended is not known: {type(error).__name__}: {error}")
        self._outbox.put(None)
        on_death(cause)

    def _handle_messages(self, on_message: Callable[[Any], None]) -> None:
        """Until the end of the pipe."""
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
        except (BrokenPipeError, ConnectionResetError):  # it is dead, of which the reading thread hears
            return
        except BaseException as error:
            logger.exception("the engine cannot be written to")
            self.kill(EngineDeadError(f"it could not be written to: {type(error).__name__}: {error}"))

    def _wait(self) -> EngineDeadError:
        """Waits for the end of a process that sends no more; returns of what it died."""
        try:
            return self._cause(self._process.wait(_CLOSE_TIMEOUT_S))
        except subprocess.TimeoutExpired:  # it lives without a pipe: of no use
            self.kill(EngineDeadError("it closed its pipe"))
        try:
            return self._cause(self._process.wait(_CLOSE_TIMEOUT_S))
        except subprocess.TimeoutExpired:
            return EngineStuckError("it cannot be killed")

    def _cause(self, code: int) -> EngineDeadError:
        if self._killed_because is not None:
            return self._killed_because
        return cause_of_death(code, self._died, oom_kills() > self._oom_kills)
