"""Node 0's side of an engine: listens for the other nodes that have ranks of this engine.

It listens as long as the engine lives. A node that is already connected, or was connected when the engine started, is
turned away, and connections from other programs are closed, without effect on the engine. Each handshake has a timeout
of `_GREETING_S`; if more than `_MAX_GREETINGS` are in progress, the oldest ones are ended.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import logging
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from stoker_common.errors import ArgumentError, EngineDeadError
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.nodes.addresses import listen
from stoker_engine.nodes.connection import NodeConnection, reset_on_close
from stoker_engine.nodes.handshake import VARIABLE, WrongKeyError, greet_node, node_key
from stoker_engine.nodes.node import Node
from stoker_engine.nodes.node_info import NodeInfo
from stoker_engine.nodes.placement import RankPlacement

logger = logging.getLogger(__name__)

#: Timeout of a handshake, in seconds, and maximum number of concurrent handshakes.
_GREETING_S: Final = 10.0
_MAX_GREETINGS: Final = 64

#: Seconds between log lines about missing nodes.
_LOG_INTERVAL_S: Final = 5.0

#: Maximum wait until the port of an engine that has just died is free, in seconds.
_PORT_S: Final = 10.0

#: Maximum timeout from which the deadline in messages is computed, in seconds.
_LONGEST_S: Final = 10**9

#: Maximum time that `dismiss` waits for missing nodes, in seconds: running nodes retry more often.
_COME_S: Final = 2.0


class Head:
    """The head of an engine. Listens from its construction on.

    Args:
        model: path of the model's files on this node.
        on_waiting: called by `nodes` with a message whenever the missing nodes change, and with an empty one when all
            have connected.

    Attributes:
        engine: the index of the engine.
        address: the address by which other nodes reach this one.

    Raises:
        ArgumentError: the port cannot be opened.
    """

    def __init__(
        self, args: EngineArgs, model: Path, engine: int = 0, on_waiting: Callable[[str], None] = lambda _: None
    ) -> None:
        assert args.master_addr is not None
        self.placement, self.engine, self.address = RankPlacement.of(args), engine, args.master_addr
        self._timeout_s = args.distributed_timeout_seconds
        self._hello = NodeInfo.of(args, model)
        self._key = node_key()
        self._expected = [node for node in self.placement.nodes_of(engine) if node != 0]
        self._on_waiting = on_waiting
        self._nodes: dict[int, Node] = {}
        self._news = threading.Condition()  # protects the state of nodes; notified of changes
        self._complete = False  # whether `nodes` has returned all nodes
        self._refused: ArgumentError | None = None
        self._greetings: dict[socket.socket, float] = {}  # deadlines of handshakes, the oldest first
        self._greeting = threading.Lock()  # protects `_greetings`
        self._closed = False
        self._listening = _listen(args.master_addr, args.master_port + engine)
        self._listens_at = _named(self._listening.getsockname())
        self._wake, self._wake_end = socket.socketpair()
        if not self._key:
            logger.warning(
                "%s is not set, so any client that reaches port %d can run code; set the same key on all nodes",
                VARIABLE,
                args.master_port + engine,
            )
        atexit.register(self.dismiss)  # a script may exit without shutting down
        threading.Thread(target=self._accept, name="nodes", daemon=True).start()

    @classmethod
    def of(
        cls, args: EngineArgs, model: Path, engine: int = 0, on_waiting: Callable[[str], None] = lambda _: None
    ) -> Head | None:
        """Return the head of an engine; None if all its ranks are on this node.

        Raises:
            ArgumentError: this is not node 0, or the port cannot be opened.
        """
        if args.node_rank:
            raise ArgumentError("--node-rank", "node 0 runs the engine; run `stoker serve … --headless` on the others")
        return cls(args, model, engine, on_waiting) if RankPlacement.of(args).nodes_of(engine) != range(1) else None

    def nodes(self, on_progress: Callable[[], None] = lambda: None) -> dict[int, Node]:
        """Wait until all other nodes with ranks of this engine have connected, and return them by index.

        Raises:
            ArgumentError: a node with the right key was rejected.
            EngineDeadError: some nodes did not connect in time.
        """
        began = last_logged = time.monotonic()
        until = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time.time() + min(self._timeout_s, _LONGEST_S)))
        reported = ""
        with self._news:
            while missing := self._missing():
                if self._refused is not None:
                    raise self._refused
                missing_nodes = f"{_names(missing)} of {self.placement.nodes}"
                now = time.monotonic()
                if now > began + self._timeout_s:
                    raise EngineDeadError(
                        f"{missing_nodes} did not connect to {self._listens_at} within {self._timeout_s} s "
                        "(--distributed-timeout-seconds); see the log of `stoker serve … --headless` there"
                    )
                waiting = (
                    f"waiting for {missing_nodes} at {self._listens_at}, until {until} (--distributed-timeout-seconds)"
                )
                if waiting != reported:
                    reported = waiting
                    self._on_waiting(waiting)
                if now > last_logged + _LOG_INTERVAL_S:
                    last_logged = now
                    logger.info("%s", waiting)
                self._news.wait(1.0)
                on_progress()
            self._complete = True
            nodes = dict(self._nodes)
        if reported:
            self._on_waiting("")
        return nodes

    def dismiss(self, because: str = "") -> None:
        """Notify the nodes that this head will not return, so that they exit.

        Args:
            because: why the engine could not serve; nodes that connect within `_COME_S` receive this reason, too.
                Empty: a normal shutdown.
        """
        with self._news:
            if because and not self._complete and self._refused is None:
                self._news.wait_for(lambda: self._closed or not self._missing(), _COME_S)
            nodes = list(self._nodes.values())
        for node in nodes:
            node.dismiss(because)

    def close(self) -> None:
        """Stop listening, and close the connections to all nodes."""
        atexit.unregister(self.dismiss)
        self._closed = True
        self._wake.close()
        with self._news:
            for node in self._nodes.values():
                node.close()
            self._news.notify_all()

    def _missing(self) -> list[int]:
        """Return the nodes that have not connected, or are lost."""
        return [
            node for node in self._expected if node not in self._nodes or self._nodes[node].cause_of_loss is not None
        ]

    def _accept(self) -> None:
        """Accept connections until `close`, and handle each in its own thread."""
        poll = select.poll()
        poll.register(self._listening.fileno(), select.POLLIN)
        poll.register(self._wake_end.fileno(), 0)
        while not self._closed:
            poll.poll(1000 if self._end_greetings(before=time.monotonic()) else None)
            if self._closed:
                break
            try:
                sock, _ = self._listening.accept()
            except BlockingIOError:
                continue
            except OSError as error:  # for example, the connection is already closed, or no file descriptors are free
                logger.warning("cannot accept a connection of another node: %s", error)
                time.sleep(0.1)
                continue
            with self._greeting:
                self._greetings[sock] = time.monotonic() + _GREETING_S
            self._end_greetings(max_greetings=_MAX_GREETINGS)
            threading.Thread(target=self._greet, args=(sock,), name="node", daemon=True).start()
        self._listening.close()
        self._wake_end.close()

    def _end_greetings(self, before: float = 0.0, max_greetings: int = _MAX_GREETINGS) -> bool:
        """Shut down the sockets of handshakes whose deadline is before `before`, and of the oldest ones beyond
        `max_greetings`; their threads close them. Return whether handshakes remain."""
        with self._greeting:
            for sock, until in list(self._greetings.items()):
                if until < before or len(self._greetings) > max_greetings:
                    del self._greetings[sock]
                    with contextlib.suppress(OSError):
                        sock.shutdown(socket.SHUT_RDWR)
            return bool(self._greetings)

    def _greet(self, sock: socket.socket) -> None:
        """Authenticate a connection, and admit its node or rank, or close it."""
        connection: NodeConnection | None = None
        try:
            connection = NodeConnection(sock)
            connection.wait_at_most(_GREETING_S)
            greet_node(connection, self._key)
            info = connection.receive()
            self._has_greeted(sock)
            if "rank" in info:
                self._admit_rank(connection, int(info["node"]), int(info["rank"]))
            else:
                self._admit_node(connection, int(info["node"]), str(info.get("path")), NodeInfo.read(info))
        except WrongKeyError:
            assert connection is not None
            logger.warning("rejected %s: it has another key; set the same %s", connection.address, VARIABLE)
            connection.close()
        except Exception as error:  # other programs may send anything
            logger.info("closed a connection whose handshake failed: %s: %s", type(error).__name__, error)
            if connection is not None:
                connection.close()
            else:
                sock.close()
        finally:
            self._has_greeted(sock)

    def _has_greeted(self, sock: socket.socket) -> None:
        with self._greeting:
            self._greetings.pop(sock, None)

    def _admit_node(self, connection: NodeConnection, node_index: int, model: str, info: NodeInfo) -> None:
        name = f"node {node_index} ({connection.address})"
        refusal = self._hello.refusal(info, name)
        if refusal is None and node_index not in self._expected:
            refusal = ArgumentError("--node-rank", f"{name} has no ranks of engine {self.engine}")
        if refusal is not None:
            self._refuse(connection, name, refusal)
            return
        node = Node(node_index, connection, model)
        with self._news:
            if self._closed:  # `close` would not close this connection
                connection.close()
                return
            known_node = self._nodes.get(node_index)
            if known_node is not None and (self._complete or known_node.cause_of_loss is None):
                connection.send(later=f"{known_node.name} is already connected")
                connection.close()
                return
            connection.send(welcome=True)  # before a thread that waits for the node sends commands
            connection.wait_at_most(0)
            self._nodes[node_index] = node
            self._news.notify_all()
        logger.info("%s has connected", name)
        node.listen()

    def _refuse(self, connection: NodeConnection, name: str, refusal: ArgumentError) -> None:
        """Send the reason to the node, and let `nodes` raise it."""
        logger.error("rejected %s: %s", name, refusal)
        connection.send(refused=refusal.message, argument=refusal.argument)
        connection.close()
        with self._news:
            self._refused = refusal
            self._news.notify_all()

    def _admit_rank(self, connection: NodeConnection, node_index: int, rank: int) -> None:
        node = self._nodes.get(node_index)
        if node is None or not node.expect(rank):
            connection.send(refused=f"rank {rank} of node {node_index} is not expected", argument="")
            connection.close()
            return
        connection.send(welcome=True)
        sock = connection.release()
        reset_on_close(sock)
        node.deliver(rank, sock)


def _listen(host: str, port: int) -> socket.socket:
    deadline = time.monotonic() + _PORT_S
    while True:
        try:
            sock = listen(host, port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and time.monotonic() < deadline:
                time.sleep(0.1)
                continue
            raise ArgumentError("--master-port", f"node 0 cannot listen on {host}:{port}: {error.strerror}") from error
        sock.setblocking(False)
        return sock


def _names(nodes: list[int]) -> str:
    return f"node{'s' if len(nodes) > 1 else ''} {', '.join(map(str, nodes))}"


def _named(address: Sequence[Any]) -> str:
    """Return a socket's address as HOST:PORT."""
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
