"""The engine process as the server sees it: started, written to, listened to, looked at, killed."""

from __future__ import annotations

import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from stoker_engine.contract.errors import EngineDeadError, EngineOutOfMemoryError, EngineStuckError
from stoker_engine.processes.messages import Died
from stoker_engine.processes.oom_kills import oom_kills
from stoker_engine.processes.status_word import Stage, StatusWord

logger = logging.getLogger(__name__)

#: What runs in the process. `-P`: what lies in the working directory is not imported.
PROGRAM: Final = ("-P", "-m", "stoker_engine.processes.main")

#: Seconds an engine that is told to end may take.
_CLOSE_TIMEOUT_S: Final = 5


class EngineProcess:
    """One engine process. It starts at once: importing torch overlaps with all that the server has to do.

    Args:
        log_format: see `logs.configure`.
        program: interpreter arguments of what runs; tests bring their own.
    """

    def __init__(self, log_format: str = "text", program: Sequence[str] = PROGRAM) -> None:
        self.status = StatusWord()
        self.status.enter(Stage.STARTING)
        self._socket, theirs = socket.socketpair()
        self._connection = Connection(os.dup(self._socket.fileno()))
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._killed_because: str | None = None
        self._died: Died | None = None
        self._oom_kills = oom_kills()
        # The kernel takes the death of the thread that starts a process for the death of its parent.
        parent = os.getpid() if threading.current_thread() is threading.main_thread() else 0
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    *program,
                    str(theirs.fileno()),
                    str(self.status.fd),
                    log_format,
                    str(parent),
                ],
                pass_fds=(theirs.fileno(), self.status.fd),
                process_group=0,  # Ctrl-C in a terminal is for the server, which ends the engine in its own time
            )
        os.close(self.status.fd)  # the memory stays, for as long as one of the two looks at it
        self.pid: int = self._process.pid

    def listen(self, on_message: Callable[[Any], None], on_death: Callable[[EngineDeadError], None]) -> None:
        """Starts the threads that read and write the pipe.

        Args:
            on_message: called in the reading thread, with each message.
            on_death: called in it once, last, with the sentence that says of what the engine died.
        """
        threading.Thread(target=self._read, args=(on_message, on_death), name="from-engine", daemon=True).start()
        threading.Thread(target=self._write, name="to-engine", daemon=True).start()

    def send(self, message: Any) -> None:
        """Sends a message, without waiting; to a dead engine it is lost."""
        self._outbox.put(message)

    @property
    def is_running(self) -> bool:
        """Whether the process lives and is not stopped, right now."""
        return self._state() not in (b"T", b"t", b"Z", b"X", b"x")

    @property
    def is_stopped(self) -> bool:
        """Whether the process lives and is stopped (SIGSTOP, a debugger, a frozen container), right now."""
        return self._state() in (b"T", b"t")

    def _state(self) -> bytes:
        """The process's state as Linux writes it; X also where there is none any more."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_bytes()
        except OSError:
            return b"R" if sys.platform != "linux" and self._process.poll() is None else b"X"
        return stat.rpartition(b")")[2].split()[0]

    def kill(self, because: str) -> None:
        """Ends the process, whatever it does."""
        self._killed_because = self._killed_because or because
        self._process.kill()

    def close(self) -> None:
        """Tells the engine to end, and waits until it has."""
        self._outbox.put(None)
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            logger.debug("the engine is gone already")
        try:
            self._process.wait(_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill("it did not end when told to")
            self._process.wait()
        self._socket.close()

    def _read(self, on_message: Callable[[Any], None], on_death: Callable[[EngineDeadError], None]) -> None:
        while True:
            try:
                message = self._connection.recv()
            except (EOFError, OSError):
                break
            if isinstance(message, Died):
                self._died = message
            else:
                on_message(message)
        try:
            code = self._process.wait(_CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # it lives without a pipe: of no use
            self.kill("it closed its pipe")
            code = self._process.wait()
        self._outbox.put(None)
        on_death(self._cause(code))

    def _write(self) -> None:
        while (message := self._outbox.get()) is not None:
            try:
                self._connection.send(message)
            except OSError:
                return

    def _cause(self, code: int) -> EngineDeadError:
        if self._killed_because:
            return EngineStuckError(self._killed_because)
        if self._died:
            kind = EngineOutOfMemoryError if self._died.out_of_memory else EngineDeadError
            return kind(f"{self._died.message} (exit code {code}; the log says more)")
        if code == -signal.SIGKILL and oom_kills() > self._oom_kills:
            return EngineOutOfMemoryError("the kernel killed it because the container's memory ran out (SIGKILL)")
        if code == -signal.SIGKILL:
            return EngineDeadError("it was killed by signal 9 (SIGKILL), maybe because memory ran out")
        if code < 0:
            return EngineDeadError(f"it was killed by signal {-code} ({signal.Signals(-code).name})")
        return EngineDeadError(f"it ended with exit code {code}; its log says why")
