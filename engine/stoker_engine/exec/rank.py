"""The executor's interface to one rank: messages, state and termination."""

from __future__ import annotations

import logging
import os
import pickle
import socket
import struct
import threading
from abc import ABC, abstractmethod
from multiprocessing.connection import Connection
from typing import Any

from stoker_common.errors import StokerError
from stoker_common.subprocesses.death import Died
from stoker_common.subprocesses.load_failed import LoadFailed
from stoker_engine.exec.rank_messages import Lost, Setup

logger = logging.getLogger(__name__)


class Rank(ABC):
    """A rank behind a pipe, which is one end of a connected pair of sockets.

    Args:
        name: for example "rank 1 of 2".
        pipe: this end.
        setup: the rank's settings, which are sent to it. `setup.timeout_s` also limits how long this object's sends and
            receives wait for the rank.
        model: path of the model's files for the rank; None: the same as the executor's.

    Attributes:
        lost: the message that the rank ends because of another rank, if received.
        was_killed: whether the executor killed it.
        was_stopped: whether it was stopped (SIGSTOP) when it was killed.
    """

    def __init__(self, name: str, pipe: socket.socket, setup: Setup, model: str | None = None) -> None:
        self.name, self.model = name, model
        self.lost: Lost | None = None
        self.was_killed = self.was_stopped = False
        self._last: Died | LoadFailed | None = None
        self._reading = threading.Lock()
        self._socket = pipe
        self.connection = Connection(os.dup(pipe.fileno()))
        seconds, part = divmod(setup.timeout_s, 1)
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            pipe.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), max(1, int(1e6 * part))))
        try:
            self.send(pickle.dumps(setup, pickle.HIGHEST_PROTOCOL))
        except OSError:
            logger.debug("%s has already ended", self.name)  # the next wait for it reports this

    @property
    @abstractmethod
    def is_stopped(self) -> bool:
        """Whether the rank's process is alive but stopped (SIGSTOP)."""

    @abstractmethod
    def wait(self, timeout_s: float) -> bool:
        """Wait until the rank has ended or its node is lost, for at most `timeout_s` seconds. Returns whether that
        happened."""

    @abstractmethod
    def kill(self) -> None:
        """Kill the rank in any state, without waiting; `wait` returns when it has ended."""

    @abstractmethod
    def cause_of_death(self, last: Died | None) -> StokerError:
        """Return why the rank ended by itself; `last` is its last message, or None."""

    def send(self, data: bytes) -> None:
        """Send a pickled message.

        Raises:
            BlockingIOError: the rank does not read in time.
            OSError: the rank has ended, or its node is lost.
        """
        self.connection.send_bytes(data)

    def receive(self) -> Any:
        """Return the next message. None: it was the rank's last one (`Lost`, `Died` or `LoadFailed`), which is stored.

        Raises:
            EOFError, OSError: the rank has ended, or its node is lost.
            BlockingIOError: the rank does not send a whole message in time.
            Exception: the message cannot be unpickled.
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

    def finish(self) -> None:
        """Let the rank end: no more messages will be sent."""
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            return  # it has already ended

    def close(self) -> None:
        """Close the pipe."""
        self.connection.close()
        self._socket.close()

    def cause(self) -> StokerError | None:
        """Return why the rank ended by itself; None if it ended because of another rank, or the executor killed it.
        Called after its end."""
        with self._reading:
            self._read_last_message()
        if isinstance(self._last, LoadFailed):
            return self._last.error()
        if self.lost is not None or (self.was_killed and self._last is None):
            return None
        return self.cause_of_death(self._last)

    def _read_last_message(self) -> None:
        while self.lost is None and self._last is None and self.connection.poll():
            try:
                self._receive()
            except (EOFError, OSError):
                return
            except Exception:
                continue  # complete, but not a valid message
