"""A rank that runs in a child process."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Final

from stoker_common.errors import StokerError
from stoker_common.subprocesses.death import Died, cause_of_death, is_stopped, process_state
from stoker_common.subprocesses.lifeline import parent_for_child
from stoker_common.subprocesses.oom_kills import oom_kills
from stoker_engine.exec.rank import Rank
from stoker_engine.exec.rank_messages import Setup

logger = logging.getLogger(__name__)

#: Arguments of the interpreter. `-P` prevents imports from the working directory.
PROGRAM: Final = ("-P", "-m", "stoker_engine.exec.rank_main")


class RankProcess(Rank):
    """A rank's process. It starts immediately, and loads when it gets the engine's arguments.

    Args:
        inherited: file descriptors shared with other ranks.
        log_format: see `logs.configure`.
        program: interpreter arguments of the program; tests replace it.

    Raises:
        OSError: the system has no processes or memory left.
    """

    def __init__(
        self, setup: Setup, inherited: Sequence[int], log_format: str, program: Sequence[str] = PROGRAM
    ) -> None:
        self._oom_kills = oom_kills()
        executor_socket, rank_socket = socket.socketpair()
        with rank_socket:
            arguments = (setup.rank, rank_socket.fileno(), log_format, parent_for_child())
            self._process = subprocess.Popen(
                [sys.executable, *program, *map(str, arguments)],
                pass_fds=(rank_socket.fileno(), *inherited),
                process_group=0,  # the parent handles Ctrl-C in a terminal
            )
        self.pid: int = self._process.pid
        super().__init__(f"rank {setup.rank} of {setup.layout.size}", executor_socket, setup)

    @property
    def is_stopped(self) -> bool:
        """See `Rank`."""
        return is_stopped(process_state(self.pid))

    def wait(self, timeout_s: float) -> bool:
        """See `Rank`."""
        try:
            self._process.wait(max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """See `Rank`."""
        if not self.wait(0):
            self.was_killed, self.was_stopped = True, self.is_stopped
            self._process.kill()

    def cause_of_death(self, last: Died | None) -> StokerError:
        """See `Rank`."""
        return cause_of_death(self._process.returncode, last, oom_kills() > self._oom_kills, self.name)

    def __str__(self) -> str:
        """Return the name with the process id."""
        return f"{self.name} (process {self.pid})"
