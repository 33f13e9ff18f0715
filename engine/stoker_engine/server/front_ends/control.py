"""Messages between the supervisor and its front ends, pickled, and their pipe.

To a front end: `Start` first; `FilesFound`; an `EngineDied` for each process of an engine; `Reply` to a `Call`; `Ping`;
`End`. Over another socket: an `EngineLinked` with its descriptors for each process of an engine; `EngineDied` first, if
the newest process was already dead when the front end started.
To the supervisor: `Ready`; `Call`; `Rejected`; `KillEngine`; `Pong` to a `Ping`; `Failed`.
"""

from __future__ import annotations

import logging
import pickle
import queue
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final

from stoker_common.errors import EngineDeadError, StokerError
from stoker_common.subprocesses.load_failed import LoadFailed
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.contract.serve_args import ServeArgs

logger = logging.getLogger(__name__)

#: Maximum time for writing the last messages to the pipe, in seconds.
_FLUSH_TIMEOUT_S: Final = 5.0


@dataclass(frozen=True)
class Start:
    """What a front end serves.

    Attributes:
        index: its index among the server's front ends, which its successor inherits.
        name: see `Peers.name`.
        created: see `Peers.created`.
        min_engines: number of engines that must serve before it does.
    """

    args: ServeArgs
    index: int
    name: str
    created: int
    min_engines: int


@dataclass(frozen=True)
class FilesFound:
    """The engine's arguments with the path of the model's files."""

    args: EngineArgs


@dataclass(frozen=True)
class EngineDied:
    """A process of an engine is dead.

    Attributes:
        serial: number of the process, counted from 0 for each engine.
    """

    engine: int
    serial: int
    cause: EngineDeadError


@dataclass(frozen=True)
class EngineLinked:
    """A link to a process of an engine. Its descriptors are the pipe and the heartbeat.

    Attributes:
        serial: see `EngineDied`.
        pid: its process id.
    """

    engine: int
    serial: int
    pid: int


@dataclass(frozen=True)
class Call:
    """A call of one of the supervisor's methods."""

    number: int
    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Reply:
    """The result of a call, or the error that it raised."""

    number: int
    value: Any
    error: StokerError | None = None


@dataclass(frozen=True)
class KillEngine:
    """Kill a process of an engine, because it is stopped or stuck."""

    engine: int
    serial: int
    cause: EngineDeadError


@dataclass(frozen=True)
class Rejected:
    """A queue limit rejected a request."""

    limit: str


@dataclass(frozen=True)
class Ready:
    """The front end serves."""


@dataclass(frozen=True)
class Failed:
    """The front end ends because of an error."""

    error: LoadFailed


@dataclass(frozen=True)
class Ping:
    """A question whether the front end's event loop runs."""


@dataclass(frozen=True)
class Pong:
    """The answer to `Ping`."""


@dataclass(frozen=True)
class End:
    """End now, as after a second signal."""


class ControlPipe:
    """One end of the pipe between the supervisor and a front end. `send` may be called in any thread."""

    def __init__(self, pipe: socket.socket) -> None:
        self._connection = Connection(pipe.detach())
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="to-control", daemon=True)

    def receive(self) -> Any:
        """Wait for a message. Called before `listen`.

        Raises:
            EOFError, OSError: the other process has ended.
        """
        return self._connection.recv()

    def listen(self, on_message: Callable[[Any], None], on_end: Callable[[], None]) -> None:
        """Start the threads that read and write the pipe.

        Args:
            on_message: called in the reading thread with each message.
            on_end: called at the end of the reading thread: the pipe is closed, or a message could not be handled.
        """
        threading.Thread(target=self._read, args=(on_message, on_end), name="from-control", daemon=True).start()
        self._writer.start()

    def send(self, message: Any) -> None:
        """Send a message without waiting. It is lost if the other process has ended."""
        self._outbox.put(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def flush(self) -> None:
        """Send all messages, and no more afterwards. Waits until they are written, at most `_FLUSH_TIMEOUT_S`."""
        self._outbox.put(None)
        self._writer.join(_FLUSH_TIMEOUT_S)

    def _read(self, on_message: Callable[[Any], None], on_end: Callable[[], None]) -> None:
        try:
            while True:
                on_message(self._connection.recv())
        except (EOFError, OSError):
            logger.debug("a control pipe is closed")
        except Exception:
            logger.exception("a message between the processes of the server cannot be handled")
        self._outbox.put(None)
        on_end()

    def _write(self) -> None:
        try:
            while (data := self._outbox.get()) is not None:
                self._connection.send_bytes(data)
        except OSError:
            logger.debug("a control pipe is closed")
