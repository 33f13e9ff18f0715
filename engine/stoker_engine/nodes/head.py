"""Node 0's side of one engine of the model: it listens for the other nodes that have ranks of it.

It listens for as long as the engine lives: who comes too late, comes twice or is no node at all is told so or hung up
on, and hurts nobody. A connection that does not get on is closed after seconds; of many such the oldest go first.
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

#: Seconds that a connection has to say who it is, and how many may be at that.
_GREETING_S: Final = 10.0
_MAX_GREETINGS: Final = 64

#: Seconds between two lines on who is missing.
_LOG_INTERVAL_S: Final = 5.0

#: Seconds in which the port of an engine that has just died becomes free.
_PORT_S: Final = 10.0

#: Seconds after which nobody waits any more, whatever they were told.
_LONGEST_S: Final = 10**9

#: Seconds in which nodes that run come by, as they try again and again.
_COME_S: Final = 2.0


class Head:
    """Listens from its making on.

    Args:
        args: the engine's.
        model: where this node has its files.
        engine: the number of the engine.
        on_waiting: called with a sentence on who is missing whenever that changes, and with an empty one in the end.

    Attributes:
        placement: where ranks are.
        engine: the number.
        address: by which other nodes reach this one.

    Raises:
        ArgumentError: it cannot listen at its address.
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
        self._news = threading.Condition()  # held by whoever looks at nodes, or changes them
        self._complete = False  # all have come, and whoever waited for them works with these
        self._refused: ArgumentError | None = None
        self._greetings: dict[socket.socket, float] = {}  # until when, the oldest first
        self._greeting = threading.Lock()  # held by whoever looks at these, or changes them
        self._closed = False
        self._listening = _listen(args.master_addr, args.master_port + engine)
        self._listens_at = _named(self._listening.getsockname())
        self._wake, self._wake_end = socket.socketpair()
        if not self._key:
            logger.warning(
                "%s is not set: whoever reaches port %d can run code here; set the same key on all nodes",
                VARIABLE,
                args.master_port + engine,
            )
        atexit.register(self.dismiss)  # a script may end without a word
        threading.Thread(target=self._accept, name="nodes", daemon=True).start()

    @classmethod
    def of(
        cls, args: EngineArgs, model: Path, engine: int = 0, on_waiting: Callable[[str], None] = lambda _: None
    ) -> Head | None:
        """The head of an engine; None where all its ranks are on this node.

        Raises:
            ArgumentError: this is not node 0, or it cannot listen.
        """
        if args.node_rank:
            raise ArgumentError("--node-rank", "node 0 runs the engine; run `stoker serve … --headless` on the others")
        return cls(args, model, engine, on_waiting) if RankPlacement.of(args).nodes_of(engine) != range(1) else None

    def nodes(self, on_progress: Callable[[], None] = lambda: None) -> dict[int, Node]:
        """Waits until all nodes that have ranks of this engine are there.

        Raises:
            ArgumentError: one of them cannot be taken in.
            EngineDeadError: some did not come in time.
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
                        f"{missing_nodes} did not come to {self._listens_at} within {self._timeout_s} s "
                        "(--distributed-timeout-seconds); look at what `stoker serve … --headless` says there"
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
        """Lets the nodes go: this head comes back no more; `because` says why it could not serve. Nodes that are about
        to come hear of that too."""
        with self._news:
            if because and not self._complete and self._refused is None:
                self._news.wait_for(lambda: self._closed or not self._missing(), _COME_S)
            nodes = list(self._nodes.values())
        for node in nodes:
            node.dismiss(because)

    def close(self) -> None:
        """Ends all connections."""
        atexit.unregister(self.dismiss)
        self._closed = True
        self._wake.close()
        with self._news:
            for node in self._nodes.values():
                node.close()
            self._news.notify_all()

    def _missing(self) -> list[int]:
        """Nodes that have not come, or are gone again."""
        return [
            node for node in self._expected if node not in self._nodes or self._nodes[node].cause_of_loss is not None
        ]

    def _accept(self) -> None:
        """Takes connections in, each of which gets a thread."""
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
            except OSError as error:  # it is gone already, or there are no descriptors left for now
                logger.warning("a connection of another node could not be taken in: %s", error)
                time.sleep(0.1)
                continue
            with self._greeting:
                self._greetings[sock] = time.monotonic() + _GREETING_S
            self._end_greetings(max_greetings=_MAX_GREETINGS)
            threading.Thread(target=self._greet, args=(sock,), name="node", daemon=True).start()
        self._listening.close()
        self._wake_end.close()

    def _end_greetings(self, before: float = 0.0, max_greetings: int = _MAX_GREETINGS) -> bool:
        """Hangs up on those that were to get on `before` then, and on the oldest of more than `max_greetings`; their
        threads close them. Whether there are others."""
        with self._greeting:
            for sock, until in list(self._greetings.items()):
                if until < before or len(self._greetings) > max_greetings:
                    del self._greetings[sock]
                    with contextlib.suppress(OSError):
                        sock.shutdown(socket.SHUT_RDWR)
            return bool(self._greetings)

    def _greet(self, sock: socket.socket) -> None:
        """Learns who that is, and serves it."""
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
            logger.warning("%s has another key, and is not taken in; set the same %s", connection.address, VARIABLE)
            connection.close()
        except Exception as error:  # whatever somebody may send
            logger.info("a connection that was no node's ended: %s: %s", type(error).__name__, error)
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
            if self._closed:  # nobody would end it any more
                connection.close()
                return
            known_node = self._nodes.get(node_index)
            if known_node is not None and (self._complete or known_node.cause_of_loss is None):
                connection.send(later=f"{known_node.name} is there already")
                connection.close()
                return
            connection.send(welcome=True)  # before whoever waits for the node sends it orders
            connection.wait_at_most(0)
            self._nodes[node_index] = node
            self._news.notify_all()
        logger.info("%s is there", name)
        node.listen()

    def _refuse(self, connection: NodeConnection, name: str, refusal: ArgumentError) -> None:
        """Says why, to the node and to whoever waits for it."""
        logger.error("%s is not taken in: %s", name, refusal)
        connection.send(refused=refusal.message, argument=refusal.argument)
        connection.close()
        with self._news:
            self._refused = refusal
            self._news.notify_all()

    def _admit_rank(self, connection: NodeConnection, node_index: int, rank: int) -> None:
        node = self._nodes.get(node_index)
        if node is None or not node.awaits(rank):
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
    """An address of a socket as people write it."""
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
