"""One rank as the executor sees it: written to, read from, looked at, ended."""

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
        name: "rank 1 of 2".
        pipe: this end.
        setup: who it is. Others wait for it to read or to write on as long as it waits for them.
        model: where the rank finds the model's files; None: where the executor does.

    Attributes:
        lost: it ended for want of another rank.
        was_killed: it was ended from here.
        was_stopped: and did not run at that moment.
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
            logger.debug("%s is gone already", self.name)  # which whoever waits for it will notice

    @property
    @abstractmethod
    def is_stopped(self) -> bool:
        """Whether it lives and is stopped, right now."""

    @abstractmethod
    def wait(self, timeout_s: float) -> bool:
        """Waits until it has ended; whether it has."""

    @abstractmethod
    def kill(self) -> None:
        """Ends it, whatever it does; `wait` tells when it has."""

    @abstractmethod
    def cause_of_death(self, last: Died | None) -> StokerError:
        """Why it ended by itself; `last` are its last words."""

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

    def finish(self) -> None:
        """Lets it end: no more messages come."""
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            return  # it is gone already

    def close(self) -> None:
        """Forgets the pipe."""
        self.connection.close()
        self._socket.close()

    def cause(self) -> StokerError | None:
        """Why it ended, once it has, by itself; None where others were the reason."""
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
                continue  # whole, but no message
