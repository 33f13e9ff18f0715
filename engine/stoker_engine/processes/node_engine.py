"""A node's ranks of one engine of the model, for as long as the engine's head is there.

from the head    {"start": 2}, {"kill": 2}, {"farewell": ""}
to it            {"rank": 2, "code": -9, "killed_for_memory": false}, {"rank": 2, "stopped": true},
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

#: What runs in a rank's process. `-P`: what lies in the working directory is not imported.
PROGRAM: Final = ("-P", "-m", "stoker_engine.exec.rank_main")

#: Seconds between two looks at the ranks.
_CHECK_INTERVAL_S: Final = 0.5

#: Seconds in which ranks end that the head has let go.
_CLOSE_S: Final = 5.0


@dataclass
class _Started:
    """A rank's process, a descriptor that is ready when it ends, and what the head knows of it."""

    process: subprocess.Popen[bytes]
    end: int
    oom_kills: int
    is_stopped: bool = False


class NodeEngine:
    """Ranks, none at first; takes `connection` over.

    Args:
        connection: to the head, which has taken this node in.
        dial: connects to the head for a rank.
        log_format: of the ranks' logs; see `logs.configure`.
        program: interpreter arguments of what runs as a rank; tests bring their own.
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
        """Does what the head says, in the thread that calls this, with whose end the ranks are killed too. At its end
        all ranks have ended.

        Args:
            wake: hangs up when this is to end.
            on_contact: called again and again; returns why this is to end, if it is.

        Returns:
            Whether this is the end: the head said so, or `on_contact`. Else the head is gone.

        Raises:
            ModelError: the head could not serve.
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
            logger.info("the head is not there any more: %s", str(error) or type(error).__name__)
            return False
        finally:
            for rank in list(self._ranks):
                self._ranks[rank].process.kill()
            for rank in list(self._ranks):
                self._forget(rank)
            self._connection.close()

    def _handle_message(self, message: dict[str, Any]) -> bool:
        """Does what a message says; whether it is the last one."""
        if "start" in message:
            self._start(int(message["start"]))
        elif "kill" in message:
            if (started := self._ranks.get(int(message["kill"]))) is not None:
                started.process.kill()
        elif message.get("farewell"):
            raise ModelError(f"node 0 could not serve: {message['farewell']}")
        elif "farewell" in message:
            logger.info("the head has ended, and this node with it")
            self._wait(_CLOSE_S)
            return True
        return False

    def _start(self, rank: int) -> None:
        """Starts a rank, whose pipe is a connection to the head."""
        before = oom_kills()
        try:
            with self._dial(rank).release() as pipe:
                process = subprocess.Popen(
                    [sys.executable, *self._program, str(rank), str(pipe.fileno()), self._log_format, str(os.getpid())],
                    pass_fds=(pipe.fileno(),),
                    process_group=0,  # Ctrl-C in a terminal is for this process
                )
        except (OSError, EOFError, ValueError, NoNodeError, StokerError) as error:
            logger.exception("rank %d cannot be started", rank)
            self._connection.send(rank=rank, error=str(error) or type(error).__name__)
            return
        started = self._ranks[rank] = _Started(process, os.pidfd_open(process.pid), before)
        self._poll.register(started.end, select.POLLIN)

    def _check_ranks(self) -> None:
        """Tells the head what has become of ranks."""
        for rank, started in list(self._ranks.items()):
            if (code := started.process.poll()) is not None:
                self._forget(rank)
                self._connection.send(rank=rank, code=code, killed_for_memory=oom_kills() > started.oom_kills)
            elif (stopped := is_stopped(process_state(started.process.pid))) != started.is_stopped:
                started.is_stopped = stopped
                self._connection.send(rank=rank, stopped=stopped)

    def _wait(self, timeout_s: float) -> None:
        """Waits until all ranks have ended, but not for ever."""
        deadline = time.monotonic() + timeout_s
        for started in self._ranks.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                started.process.wait(max(0.0, deadline - time.monotonic()))

    def _forget(self, rank: int) -> None:
        started = self._ranks.pop(rank)
        started.process.wait()
        self._poll.unregister(started.end)
        os.close(started.end)
