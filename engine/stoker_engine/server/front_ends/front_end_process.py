"""A front end's process, in its supervisor: start, messages, hangs and end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from stoker_common.errors import StokerError
from stoker_common.subprocesses.death import is_stopped, process_state
from stoker_common.subprocesses.lifeline import parent_for_child
from stoker_engine.server.front_ends.control import ControlPipe, End, Ping, Start

#: Arguments of the interpreter. `-P` prevents imports from the working directory.
PROGRAM: Final = ("-P", "-m", "stoker_engine.server.front_ends.main")

#: Number of consecutive checks after which a front end is killed that is stopped, or whose event loop does not answer.
_STOPPED_CHECKS: Final = 2
_SILENT_CHECKS: Final = 12
#: Number of checks that a front end may miss in addition before its first answer, while it imports modules.
_START_CHECKS: Final = 48


class FrontEndProcess:
    """A front end, which starts immediately. Must be created in the main thread: it ends with its creator's thread.

    Args:
        start: what it serves.
        bound: the socket whose connections it accepts.
        counts: descriptor of the `SharedCounts`.
        metrics: folder of its HTTP metrics.

    Attributes:
        index: its index among the server's front ends.
        pid: its process id.
        links: socket over which it receives links to engines.
        is_ready: whether it has reported that it serves.
        failure: the error that it reported before its end.

    Raises:
        OSError: the system has no processes or memory left.
    """

    def __init__(self, start: Start, bound: socket.socket, counts: int, metrics: Path) -> None:
        self.index = start.index
        self.is_ready = False
        self.failure: StokerError | None = None
        self._stopped, self._silent = 0, -_START_CHECKS
        self._killed_because: str | None = None
        control, child_control = socket.socketpair()
        self.links, child_links = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control = ControlPipe(control)
        descriptors = [child_control.fileno(), child_links.fileno(), counts, bound.fileno()]
        with child_control, child_links:
            self._process = subprocess.Popen(
                [sys.executable, *PROGRAM, *map(str, descriptors), str(parent_for_child())],
                pass_fds=descriptors,
                process_group=0,  # the supervisor passes Ctrl-C on
                env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(metrics)},
            )
        self.pid = self._process.pid
        self.send(start)

    def listen(self, on_message: Callable[[Any], None], on_exit: Callable[[str], None]) -> None:
        """Start the threads of the control pipe; when the pipe is closed, another thread waits for the process to end.

        Args:
            on_message: called in a thread with each message.
            on_exit: called once in the other thread, after the last message, with the cause of the end.
        """

        def wait() -> None:
            code = self._process.wait()
            self.links.close()
            how = f"signal {-code} ended it" if code < 0 else f"its exit code is {code}; its log says why"
            on_exit(self._killed_because or how)

        self._control.listen(on_message, lambda: threading.Thread(target=wait, daemon=True).start())

    def send(self, message: object) -> None:
        """Send a message without waiting. It is lost if the front end has ended."""
        self._control.send(message)

    def stop(self, signum: int) -> None:
        """Pass on a signal that stops the server. A front end that does not serve yet is killed, because it may not
        handle signals yet."""
        self._process.send_signal(signum if self.is_ready else signal.SIGKILL)

    def end(self) -> None:
        """End the front end at once, without waiting; kill it if it does not serve yet."""
        if self.is_ready:
            self.send(End())
        else:
            self.kill()

    def kill(self) -> None:
        """Kill the process in any state."""
        self._process.kill()

    def is_answering(self) -> None:
        """Record that the front end's event loop runs."""
        self._silent = 0

    def check(self) -> None:
        """Kill the front end if it is stopped, or if its event loop has not answered several checks."""
        self._stopped = self._stopped + 1 if is_stopped(process_state(self.pid)) else 0
        if self._stopped >= _STOPPED_CHECKS:
            self._kill_because("it was stopped, and killed")
        elif self._silent >= _SILENT_CHECKS:
            self._kill_because("it did not answer, and was killed")
        self._silent += 1
        self.send(Ping())

    def _kill_because(self, reason: str) -> None:
        self._killed_because = self._killed_because or reason
        self.kill()
