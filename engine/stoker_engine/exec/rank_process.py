"""One rank's process as the executor sees it: started, written to, read from, looked at, ended."""

from __future__ import annotations

import logging
import os
import pickle
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, Final

from stoker_engine.children.death import Died, cause_of_death, is_stopped, process_state
from stoker_engine.children.lifeline import parent_for_child
from stoker_engine.children.load_failed import LoadFailed
from stoker_engine.children.oom_kills import oom_kills
from stoker_engine.contract.errors import StokerError
from stoker_engine.exec.rank_messages import Lost, Setup

logger = logging.getLogger(__name__)

#: What runs in the process. `-P`: what lies in the working directory is not imported.
PROGRAM: Final = ("-P", "-m", "stoker_engine.exec.rank_main")


class RankProcess:
    """One rank. It starts at once, and loads when it gets the engine's arguments.

    Args:
        setup: who it is. Others wait for it to read or to write on as long as it waits for them.
        inherited: file descriptors that it shares with the others.
        log_format: see `logs.configure`.
        program: interpreter arguments of what runs; tests bring their own.

    Attributes:
        lost: it ended for want of another rank.
        was_killed: it was ended from here.
        was_stopped: and did not run at that moment.

    Raises:
        OSError: the system has no process or memory left for it.
    """

    def __init__(
        self, setup: Setup, inherited: Sequence[int], log_format: str, program: Sequence[str] = PROGRAM
    ) -> None:
        self.name = f"rank {setup.rank} of {setup.layout.size}"
        self.lost: Lost | None = None
        self.was_killed = self.was_stopped = False
        self._last: Died | LoadFailed | None = None
        self._oom_kills = oom_kills()
        self._reading = threading.Lock()
        self._socket, theirs = socket.socketpair()
        seconds, part = divmod(setup.timeout_s, 1)
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), max(1, int(1e6 * part))))
        self.connection = Connection(os.dup(self._socket.fileno()))
        with theirs:
            words = (setup.rank, theirs.fileno(), log_format, parent_for_child())
            self._process = subprocess.Popen(
                [sys.executable, *program, *map(str, words)],
                pass_fds=(theirs.fileno(), *inherited),
                process_group=0,  # Ctrl-C in a terminal is for whoever runs the ranks
            )
        self.pid: int = self._process.pid
        try:
            self.send(pickle.dumps(setup, pickle.HIGHEST_PROTOCOL))
        except OSError:
            logger.debug("%s is gone already", self.name)  # which whoever waits for it will notice

    def send(self, data: bytes) -> None:
        """Sends a pickled message.

        Raises:
            BlockingIOError: it does not read.
            OSError: it is gone.
        """
        self.connection.send_bytes(data)

    def receive(self) -> Any:
        """The next message; None where that is its last one, which is kept.

        Raises:
            EOFError, OSError: it is gone, or goes no further in the middle of a message.
            Exception: the message cannot be read.
        """
        with self._reading:
            return self._receive()

    def _receive(self) -> Any:
        message = pickle.loads(self.connection.recv_bytes())
        if isinstance(message, Lost):
            self.lost = message
        elif isinstance(message, Died | LoadFailed):
            self._last = message
        else:
            return message
        return None

    @property
    def is_stopped(self) -> bool:
        """Whether it lives and is stopped, right now."""
        return is_stopped(process_state(self.pid))

    def finish(self) -> None:
        """Lets it end: no more messages come."""
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            return  # it is gone already

    def wait(self, timeout_s: float) -> bool:
        """Waits until it has ended; whether it has."""
        try:
            self._process.wait(max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """Ends it, whatever it does; `wait` tells when it has."""
        if not self.wait(0):
            self.was_killed, self.was_stopped = True, self.is_stopped
            self._process.kill()

    def close(self) -> None:
        """Forgets the pipe."""
        self.connection.close()
        self._socket.close()

    def cause(self) -> StokerError | None:
        """Why it ended, once it has, by itself; None where others were the reason."""
        with self._reading:
            self._read_last_words()
        if isinstance(self._last, LoadFailed):
            return self._last.error()
        if self.lost is not None or (self.was_killed and self._last is None):
            return None
        code, killed_for_memory = self._process.returncode, oom_kills() > self._oom_kills
        return cause_of_death(code, self._last, killed_for_memory, self.name)

    def _read_last_words(self) -> None:
        while self.lost is None and self._last is None and self.connection.poll():
            try:
                self._receive()
            except (EOFError, OSError):
                return
            except Exception:
                continue  # whole, but no message
