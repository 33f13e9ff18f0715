"""The handle of an engine process in its parent, the server or a script: start, messages, state, and termination."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, ClassVar, Final

from stoker_common.errors import EngineDeadError, EngineStuckError
from stoker_common.subprocesses.death import cause_of_death
from stoker_common.subprocesses.lifeline import parent_for_child
from stoker_common.subprocesses.oom_kills import oom_kills
from stoker_engine.processes.engine_pipe import EnginePipe
from stoker_engine.processes.heartbeat import Heartbeat, Phase

logger = logging.getLogger(__name__)

#: Arguments of the interpreter. `-P` prevents imports from the working directory.
PROGRAM: Final = ("-P", "-m", "stoker_engine.processes.main")

#: Time for an engine to end on request, and again after a kill, in seconds.
_CLOSE_TIMEOUT_S: Final = 5


class EngineProcess(EnginePipe):
    """One engine process. It starts immediately, so that importing torch overlaps with the server's own start.

    Args:
        log_format: see `logs.configure`.
        program: interpreter arguments of the program; tests replace it.
        step_timeout: see `exec.supervision`.
        engine: index of the engine; None: the only one.
        on_death: called with the cause before the function given to `listen`, in the same thread. Given: front ends
            can be linked to the engine by `link`.

    Raises:
        OSError: the system has no processes or memory left.
    """

    is_shared: ClassVar[bool] = False
    pid: int

    def __init__(
        self,
        log_format: str = "text",
        program: Sequence[str] = PROGRAM,
        step_timeout: float = 300.0,
        engine: int | None = None,
        on_death: Callable[[EngineProcess, EngineDeadError], None] | None = None,
    ) -> None:
        super().__init__(Heartbeat())
        self.status.enter(Phase.STARTING)
        self._on_death = on_death
        pipe, child_pipe = socket.socketpair()
        self._connect(pipe)
        self._links: socket.socket | None = None
        descriptors = [child_pipe.fileno(), self.status.fd]
        child_links: socket.socket | None = None
        if on_death is not None:
            self._links, child_links = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            descriptors.append(child_links.fileno())
        self._killed_because: EngineDeadError | None = None
        self._oom_kills = oom_kills()
        try:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    *program,
                    str(child_pipe.fileno()),
                    str(self.status.fd),
                    log_format,
                    str(parent_for_child()),
                    str(step_timeout),
                    "" if engine is None else str(engine),
                    "" if child_links is None else str(child_links.fileno()),
                ],
                pass_fds=descriptors,
                process_group=0,  # this process handles Ctrl-C in a terminal, and ends the engine itself
            )
        finally:
            child_pipe.close()
            if child_links is None:
                os.close(self.status.fd)  # the memory exists as long as one of the processes maps it
            else:
                child_links.close()
        self.pid = self._process.pid

    def link(self, pipe: socket.socket) -> None:
        """Pass one end of a socket pair to the engine, for a front end that has the other end."""
        assert self._on_death is not None, "the engine was started for one front end"
        try:
            if self._links is not None:
                socket.send_fds(self._links, [b"\0"], [pipe.fileno()])
        except OSError:
            logger.debug("the engine has ended, and gets no front end")

    def kill(self, because: EngineDeadError) -> None:
        """Kill the process in any state. The first call's `because` is reported as its cause of death."""
        self._killed_because = self._killed_because or because
        self._process.kill()

    def fail(self, cause: EngineDeadError) -> None:
        """Kill the engine, which is useless without the pipe."""
        self.kill(cause)

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
        assert self._socket is not None
        self._socket.close()
        if self._links is not None:
            self._links.close()
            os.close(self.status.fd)
            self._links = None

    def _connected(self) -> Connection | None:
        return self._connection

    def _is_alive(self) -> bool:
        return self._process.poll() is None

    def _read(self, on_message: Callable[[Any], None], on_death: Callable[[EngineDeadError], None]) -> None:
        def report(cause: EngineDeadError) -> None:
            if self._on_death is not None:
                self._on_death(self, cause)
            on_death(cause)

        super()._read(on_message, report)

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
