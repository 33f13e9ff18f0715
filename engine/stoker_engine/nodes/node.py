"""The head's handle of another node: starts and kills one engine's ranks there, and receives their states."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stoker_common.errors import EngineDeadError
from stoker_engine.nodes.connection import UNREACHABLE_S, NodeConnection

logger = logging.getLogger(__name__)


@dataclass
class RankState:
    """The last reported state of a rank on a node.

    Attributes:
        pipe: the connection to the rank, from its arrival until `Node.start` returns it; otherwise None.
        is_awaited: whether `Node.start` waits for a connection that has not arrived.
        is_stopped: whether its process is stopped (SIGSTOP), or was when it ended.
        code: its exit code; None: it has not exited.
        killed_for_memory: whether the rank has exited, and the node's kernel killed a process for lack of memory while
            it ran.
        error: why it could not be started; None: no error is known.
    """

    pipe: socket.socket | None = None
    is_awaited: bool = True
    is_stopped: bool = False
    code: int | None = None
    killed_for_memory: bool = False
    error: str | None = None

    @property
    def has_ended(self) -> bool:
        """Whether the rank has exited, or could not be started."""
        return self.code is not None or self.error is not None


class Node:
    """A connected node.

    Args:
        model: path of the model's files on the node.

    Attributes:
        name: such as "node 1 (10.0.0.2)".
        cause_of_loss: why the node is lost or is about to end; None: it is connected.
    """

    def __init__(self, node_index: int, connection: NodeConnection, model: str) -> None:
        self.name, self.model = f"node {node_index} ({connection.address})", model
        self.cause_of_loss: str | None = None
        self._connection = connection
        self._ranks: dict[int, RankState] = {}
        self._news = threading.Condition()

    def start(self, rank: int, timeout_s: float) -> tuple[RankState, socket.socket]:
        """Start a rank on the node.

        Returns:
            Its state, which is updated by the node's reports, and the connection to it.

        Raises:
            EngineDeadError: the rank could not be started within `timeout_s`.
        """
        state = self._ranks[rank] = RankState()
        self._send(start=rank)
        self.wait(lambda: state.pipe is not None or state.has_ended, timeout_s)
        with self._news:
            pipe, state.pipe, state.is_awaited = state.pipe, None, False
        if pipe is None:
            why = state.error or self.cause_of_loss or f"it did not connect within {timeout_s:.0f} s"
            raise EngineDeadError(f"{self.name} could not start rank {rank}: {why}")
        return state, pipe

    def kill(self, rank: int) -> None:
        """Send the node the command to kill a rank, without waiting."""
        self._send(kill=rank)

    def dismiss(self, because: str) -> None:
        """Notify the node that the head will not return; see `Head.dismiss`."""
        self._send(farewell=because)

    def wait(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until `condition` is true or the node is lost. Return False if neither happens within `timeout_s`."""
        with self._news:
            return self._news.wait_for(lambda: condition() or self.cause_of_loss is not None, max(0.0, timeout_s))

    def expect(self, rank: int) -> bool:
        """Return whether the rank's connection is awaited. If so, the caller delivers it; later calls return False."""
        with self._news:
            state = self._ranks.get(rank)
            if state is None or not state.is_awaited or state.has_ended:
                return False
            state.is_awaited = False
            return True

    def deliver(self, rank: int, pipe: socket.socket) -> None:
        """Pass the connection of a rank to `start`, after `expect`."""
        with self._news:
            self._ranks[rank].pipe = pipe
            self._news.notify_all()

    def listen(self) -> None:
        """Process the node's reports until it is lost."""
        try:
            while True:
                self._on_message(self._connection.receive())
        except TimeoutError:
            cause = f"it did not respond for {UNREACHABLE_S} s; check the network and the machine"
        except (EOFError, ConnectionResetError):
            cause = "its `stoker serve … --headless` has ended"
        except Exception as error:  # for example an invalid message
            cause = f"{type(error).__name__}: {error}"
        with self._news:
            self.cause_of_loss = self.cause_of_loss or cause
            self._news.notify_all()
        self._connection.close()
        logger.info("%s is lost: %s", self.name, self.cause_of_loss)

    def close(self) -> None:
        """Close the connection."""
        with self._news:
            self.cause_of_loss = self.cause_of_loss or "node 0 closed the connection"
        self._connection.close()

    def _on_message(self, message: dict[str, Any]) -> None:
        with self._news:
            if "leaving" in message:
                self.cause_of_loss = f"it was asked to end ({message['leaving']})"
            else:
                state = self._ranks[int(message["rank"])]
                if "stopped" in message:
                    state.is_stopped = bool(message["stopped"])
                elif "error" in message:
                    state.error = str(message["error"])
                else:
                    state.code, state.killed_for_memory = int(message["code"]), bool(message["killed_for_memory"])
            self._news.notify_all()

    def _send(self, **message: Any) -> None:
        with contextlib.suppress(OSError):  # the connection is closed; `listen` handles that
            self._connection.send(**message)
