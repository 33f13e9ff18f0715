"""Agent of a node without an API: starts and ends ranks on request of the engines' heads on node 0.

    reach the head ──► run commands ──the head sends farewell─► end
         ▲               │
         └─ connection lost: end the engine's ranks immediately, retry for a while

A thread per engine starts the processes of the engine's ranks on this node, which end with the thread in any case
(`stoker_common.subprocesses.lifeline`). An error that prevents an engine from being served ends this agent only if no
other engine's head is connected.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import socket
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from stoker_common.errors import ArgumentError, EngineDeadError, ModelError
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.models.hub.locate import locate_model
from stoker_engine.nodes.connection import NodeConnection
from stoker_engine.nodes.handshake import VARIABLE, NoNodeError, WrongKeyError, greet_head, node_key
from stoker_engine.nodes.node_info import NodeInfo
from stoker_engine.nodes.placement import RankPlacement
from stoker_engine.processes.node_engine import PROGRAM, NodeEngine

logger = logging.getLogger(__name__)

#: Seconds between two attempts to reach a head, and between two log lines about failed attempts.
_RETRY_S: Final = 0.5
_LOG_INTERVAL_S: Final = 5.0

#: Timeout for a connection to a head, and for each of its answers, in seconds.
_GREETING_S: Final = 10.0

#: Maximum wait for the end of all threads, in seconds, since a thread may be connecting to an unresponsive head.
_LEAVE_S: Final = 2.0


class NodeAgent:
    """Runs this node's ranks.

    Args:
        log_format: see `logs.configure`.
        program: interpreter arguments of a rank's program; tests replace it.
    """

    def __init__(self, args: EngineArgs, log_format: str = "text", program: Sequence[str] = PROGRAM) -> None:
        self._args, self._program, self._log_format = args, program, log_format
        self._placement = RankPlacement.of(args)
        self._stop, self._because = threading.Event(), ""
        self._wake, self._wake_end = socket.socketpair()
        self._contact = time.monotonic()  # time of the last contact with any head; at first, the start
        self._in_touch: set[int] = set()  # engines whose heads are connected
        self._errors: list[BaseException] = []

    def run(self) -> None:
        """Serve until the heads of all engines have sent ``farewell``, or until `stop`.

        Raises:
            ArgumentError, ModelError: the model cannot be found, or an engine cannot be served together with node 0.
            EngineDeadError: no head was reached in time.
        """
        with self._wake_end:
            if (model := self._located()) is not None:
                self._serve_all(model)
        if self._errors:
            raise self._errors[0]

    def stop(self, because: str) -> None:
        """End all ranks, and let `run` return. May be called from a signal handler."""
        self._because = because
        self._stop.set()
        self._wake.close()

    def _located(self) -> Path | None:
        """Find the model's files in a daemon thread, so that a download of hours does not delay the end of the process.
        Return their path, or None after `stop`."""
        found: queue.SimpleQueue[Path | BaseException] = queue.SimpleQueue()

        def locate() -> None:
            try:
                found.put(locate_model(self._args))
            except BaseException as error:
                found.put(error)

        threading.Thread(target=locate, name="locate-model", daemon=True).start()
        while not self._stop.is_set():
            try:
                result = found.get(timeout=_RETRY_S)
            except queue.Empty:
                continue
            if isinstance(result, BaseException):
                raise result
            return result
        return None

    def _serve_all(self, model: Path) -> None:
        self._contact = time.monotonic()
        threads = [
            threading.Thread(target=self._serve, args=(engine, model), name=f"engine-{engine}", daemon=True)
            for engine in self._placement.engines_on(self._args.node_rank)
        ]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads) and not self._stop.wait(_RETRY_S):
            pass
        deadline = time.monotonic() + _LEAVE_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _serve(self, engine: int, model: Path) -> None:
        failed: ArgumentError | ModelError | None = None
        try:
            while True:
                try:
                    connection = self._reach(engine, model, failed)
                    if connection is None or self._run_commands(engine, connection):
                        return
                    failed = None
                    logger.error("lost the head of engine %d; its ranks on this node were ended", engine)
                except (ArgumentError, ModelError) as error:
                    if error is failed or not self._in_touch:
                        raise
                    failed = error
                    logger.error("engine %d cannot be served, while other engines are: %s", engine, error)
        except BaseException as error:
            self._errors.append(error)
            self.stop(f"another engine cannot be served: {error}")

    def _run_commands(self, engine: int, connection: NodeConnection) -> bool:
        """See `NodeEngine.run_commands`."""
        self._in_touch.add(engine)
        try:
            ranks = NodeEngine(connection, partial(self._dial_rank, engine), self._log_format, self._program)
            return ranks.run_commands(self._wake_end, self._on_contact)
        finally:
            self._in_touch.discard(engine)

    def _on_contact(self) -> str | None:
        """Record the contact with a head. Return the reason to end this agent, or None."""
        self._contact = time.monotonic()
        return self._because if self._stop.is_set() else None

    def _dial_rank(self, engine: int, rank: int) -> NodeConnection:
        return self._dial(engine, {"node": self._args.node_rank, "rank": rank})

    def _reach(self, engine: int, model: Path, failed: ArgumentError | ModelError | None) -> NodeConnection | None:
        """Return a connection to an engine's head that has accepted this node; None after `stop`.

        Args:
            failed: error that prevented the engine from being served; raised once no other engine's head is connected.
                None: no error.

        Raises:
            ArgumentError: the head rejects this node.
            EngineDeadError: no head was connected for `--distributed-timeout-seconds`.
        """
        last_logged = time.monotonic()
        info = {"node": self._args.node_rank, "path": str(model), **dataclasses.asdict(NodeInfo.of(self._args, model))}
        while not self._stop.is_set():
            if failed is not None:
                self._stop.wait(_RETRY_S)
                if not self._in_touch:
                    raise failed
            try:
                return self._dial(engine, info)
            except (OSError, EOFError, ValueError, NoNodeError) as error:
                why = str(error) or "it hung up"
            now = time.monotonic()
            where = f"node 0 at {self._args.master_addr}:{self._args.master_port + engine}"
            if now > self._contact + self._args.distributed_timeout_seconds:
                raise EngineDeadError(
                    f"{where} could not be reached for {now - self._contact:.0f} s (--distributed-timeout-seconds; "
                    f"--master-addr, --master-port): {why}"
                )
            if now > last_logged + _LOG_INTERVAL_S:
                last_logged = now
                logger.info("%s cannot be reached yet: %s", where, why)
            self._stop.wait(_RETRY_S)
        return None

    def _dial(self, engine: int, info: dict[str, Any]) -> NodeConnection:
        """Connect to the head of an engine.

        Raises:
            ArgumentError: the head rejects this node.
            OSError, EOFError, ValueError, NoNodeError: there is no head, or it does not accept this node yet.
        """
        address = (str(self._args.master_addr), self._args.master_port + engine)
        connection = NodeConnection(socket.create_connection(address, _GREETING_S))
        try:
            connection.wait_at_most(_GREETING_S)
            greet_head(connection, node_key())
            connection.send(**info)
            answer = connection.receive()
            if "refused" in answer:
                raise ArgumentError(str(answer.get("argument")), f"node 0 says: {answer['refused']}")
            if "later" in answer:
                raise NoNodeError(str(answer["later"]))
            connection.wait_at_most(0)
        except WrongKeyError:
            connection.close()
            raise ArgumentError(VARIABLE, f"node 0 at {address[0]}:{address[1]} has another key") from None
        except BaseException:
            connection.close()
            raise
        return connection
