"""Another node as the head of an engine sees it: told which ranks to start and to end, asked how they are."""

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
    """What a node has said of one of its ranks.

    Attributes:
        pipe: the connection to it, until the head has taken it.
        is_stopped: whether it lives and is stopped.
        code: its exit code, once it has ended.
        killed_for_memory: whether the node's kernel killed a process for want of memory meanwhile.
        error: why it could not be started.
    """

    pipe: socket.socket | None = None
    is_stopped: bool = False
    code: int | None = None
    killed_for_memory: bool = False
    error: str | None = None

    @property
    def has_ended(self) -> bool:
        """Whether it runs no more, or never did."""
        return self.code is not None or self.error is not None


class Node:
    """A node that has been taken in.

    Args:
        node_index: its own.
        connection: to it.
        model: where it has the model's files.

    Attributes:
        name: "node 1 (10.0.0.2)".
        cause_of_loss: why it is not there any more.
    """

    def __init__(self, node_index: int, connection: NodeConnection, model: str) -> None:
        self.name, self.model = f"node {node_index} ({connection.address})", model
        self.cause_of_loss: str | None = None
        self._connection = connection
        self._ranks: dict[int, RankState] = {}
        self._news = threading.Condition()

    def start(self, rank: int, timeout_s: float) -> tuple[RankState, socket.socket]:
        """Has the node start a rank.

        Returns:
            Its state, which changes with the node's news, and the connection to it.

        Raises:
            EngineDeadError: it cannot.
        """
        state = self._ranks[rank] = RankState()
        self._send(start=rank)
        self.wait(lambda: state.pipe is not None or state.has_ended, timeout_s)
        with self._news:
            pipe, state.pipe = state.pipe, None
        if pipe is None:
            why = state.error or self.cause_of_loss or f"it did not come within {timeout_s:.0f} s"
            raise EngineDeadError(f"{self.name} could not start rank {rank}: {why}")
        return state, pipe

    def kill(self, rank: int) -> None:
        """Has the node end a rank, whatever it does."""
        self._send(kill=rank)

    def dismiss(self, because: str) -> None:
        """Lets the node go: the head comes back no more; `because` says why it could not serve."""
        self._send(farewell=because)

    def wait(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Waits until news of the node make `condition` true, or it is gone; whether either is so."""
        with self._news:
            return self._news.wait_for(lambda: condition() or self.cause_of_loss is not None, max(0.0, timeout_s))

    def awaits(self, rank: int) -> bool:
        """Whether somebody waits for the connection of a rank."""
        state = self._ranks.get(rank)
        return state is not None and state.pipe is None and not state.has_ended

    def deliver(self, rank: int, pipe: socket.socket) -> None:
        """Takes the connection of a rank."""
        with self._news:
            self._ranks[rank].pipe = pipe
            self._news.notify_all()

    def listen(self) -> None:
        """Takes in what the node says, for as long as it is there."""
        try:
            while True:
                self._on_message(self._connection.receive())
        except TimeoutError:
            cause = f"it did not answer for {UNREACHABLE_S} s: the network, or the machine"
        except (EOFError, ConnectionResetError):
            cause = "its `stoker serve … --headless` has ended"
        except Exception as error:  # whatever it may say
            cause = f"{type(error).__name__}: {error}"
        with self._news:
            self.cause_of_loss = self.cause_of_loss or cause
            self._news.notify_all()
        self._connection.close()
        logger.info("%s is gone: %s", self.name, self.cause_of_loss)

    def close(self) -> None:
        """Ends the connection."""
        with self._news:
            self.cause_of_loss = self.cause_of_loss or "its connection was closed here"
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
        with contextlib.suppress(OSError):  # it is gone, of which `listen` hears
            self._connection.send(**message)
