"""A node's ranks of one engine, while the engine's head is connected.

from the head    {"start": 2}, {"kill": 2}, {"farewell": ""}
to the head      {"rank": 2, "code": -9, "killed_for_memory": false}, {"rank": 2, "stopped": true},
                 {"rank": 2, "error": "no memory left"}, {"leaving": "SIGTERM"}
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from stoker_common.errors import ModelError, StokerError
from stoker_common.subprocesses.death import is_stopped, process_state
from stoker_common.subprocesses.oom_kills import oom_kills
from stoker_engine.nodes.connection import NodeConnection
from stoker_engine.nodes.handshake import NoNodeError

logger = logging.getLogger(__name__)

#: Arguments of the interpreter for a rank. `-P` prevents imports from the working directory.
PROGRAM: Final = ("-P", "-m", "stoker_engine.exec.rank_main")

#: Maximum interval between two checks of the ranks, in seconds.
_CHECK_INTERVAL_S: Final = 0.5

#: Maximum time for ranks to end by themselves after the head's farewell, in seconds.
_CLOSE_S: Final = 5.0


@dataclass
class _Started:
    """A rank's process, its pidfd, the number of OOM kills before its start, and whether it was last reported as
    stopped."""

    process: subprocess.Popen[bytes]
    end: int
    oom_kills: int
    is_stopped: bool = False


class NodeEngine:
    """The node's ranks of one engine, initially none. Takes over `connection`.

    Args:
        connection: connection to the head, which has accepted this node.
        dial: connects to the head for a rank.
        log_format: see `logs.configure`.
        program: interpreter arguments of a rank's program; tests replace it.
    """

    def __init__(
        self,
        connection: NodeConnection,
        dial: Callable[[int], NodeConnection],
        log_format: str,
        program: Sequence[str] = PROGRAM,
    ) -> None:
        self._connection, self._dial, self._log_format, self._program = connection, dial, log_format, program
        self._ranks: dict[int, _Started] = {}
        self._poll = select.poll()
        self._poll.register(connection.fileno(), select.POLLIN)

    def run_commands(self, wake: socket.socket, on_contact: Callable[[], str | None]) -> bool:
        """Execute the head's commands until it sends ``farewell``, `on_contact` returns a reason, or the connection is
        lost. All ranks have ended when this returns or raises; the kernel kills them if the calling thread ends.

        Args:
            wake: socket whose peer is closed in order to have `on_contact` called at once.
            on_contact: called periodically; returns the reason to end, or None.

        Returns:
            True if the head sent ``farewell`` or `on_contact` returned a reason; False if the connection was lost.

        Raises:
            ModelError: the head sent ``farewell`` with a reason, because it could not serve.
        """
        self._poll.register(wake.fileno(), 0)
        try:
            while True:
                ready = {fd for fd, _ in self._poll.poll(_CHECK_INTERVAL_S * 1000)}
                if (because := on_contact()) is not None:
                    self._connection.send(leaving=because)
                    return True
                if self._connection.fileno() in ready and self._handle_message(self._connection.receive()):
                    return True
                self._check_ranks()
        except (EOFError, OSError, ValueError) as error:
            logger.info("lost the connection to the head: %s", str(error) or type(error).__name__)
            return False
        finally:
            for rank in list(self._ranks):
                self._ranks[rank].process.kill()
            for rank in list(self._ranks):
                self._forget(rank)
            self._connection.close()

    def _handle_message(self, message: dict[str, Any]) -> bool:
        """Execute a command. Return whether it is the last one."""
        if "start" in message:
            self._start(int(message["start"]))
        elif "kill" in message:
            if (started := self._ranks.get(int(message["kill"]))) is not None:
                started.process.kill()
        elif message.get("farewell"):
            raise ModelError(f"node 0 could not serve: {message['farewell']}")
        elif "farewell" in message:
            logger.info("the head has ended; the engine's ranks on this node end, too")
            self._wait(_CLOSE_S)
            return True
        return False

    def _start(self, rank: int) -> None:
        """Start a rank, whose pipe is a connection to the head. Report an error to the head."""
        before = oom_kills()
        try:
            with self._dial(rank).release() as pipe:
                process = subprocess.Popen(
                    [sys.executable, *self._program, str(rank), str(pipe.fileno()), self._log_format, str(os.getpid())],
                    pass_fds=(pipe.fileno(),),
                    process_group=0,  # this process handles Ctrl-C in a terminal
                )
        except (OSError, EOFError, ValueError, NoNodeError, StokerError) as error:
            logger.exception("rank %d cannot be started", rank)
            self._connection.send(rank=rank, error=str(error) or type(error).__name__)
            return
        started = self._ranks[rank] = _Started(process, os.pidfd_open(process.pid), before)
        self._poll.register(started.end, select.POLLIN)

    def _check_ranks(self) -> None:
        """Report to the head which ranks have ended, were stopped or continued."""
        for rank, started in list(self._ranks.items()):
            if (code := started.process.poll()) is not None:
                self._forget(rank)
                self._connection.send(rank=rank, code=code, killed_for_memory=oom_kills() > started.oom_kills)
            elif (stopped := is_stopped(process_state(started.process.pid))) != started.is_stopped:
                started.is_stopped = stopped
                self._connection.send(rank=rank, stopped=stopped)

    def _wait(self, timeout_s: float) -> None:
        """Wait until all ranks have ended, for at most `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        for started in self._ranks.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                started.process.wait(max(0.0, deadline - time.monotonic()))

    def _forget(self, rank: int) -> None:
        started = self._ranks.pop(rank)
        started.process.wait()
        self._poll.unregister(started.end)
        os.close(started.end)
