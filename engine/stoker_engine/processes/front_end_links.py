"""The links of an engine process to several front ends.

Each front end sends its requests over a pipe of its own, and receives the tokens of these requests alone, so that no
other process reads them. Reports of steps, and all else that concerns the whole engine, go to the server's supervisor.
When a front end ends, its pipe is closed, and the engine aborts its requests.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import socket
import struct
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from stoker_engine.core.engine_info import EngineInfo
from stoker_engine.core.engine_request import EngineRequest
from stoker_engine.core.outputs import StepOutputs, TokenDelta
from stoker_engine.processes.messages import Abort, MissingRanks, Stop, WaitingForNodes

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FrontEndGone:
    """Message of the inbox: a front end has closed its link."""

    link: FrontEndLink


class FrontEndLink:
    """The link to one front end. `send` never waits: a thread sends what the pipe cannot take at once."""

    def __init__(self, pipe: socket.socket) -> None:
        self._pipe = pipe
        self._connection = Connection(os.dup(pipe.fileno()), writable=False)
        self._unsent: deque[memoryview] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._writer: threading.Thread | None = None

    def receive(self) -> Any:
        """Wait for a message.

        Raises:
            EOFError, OSError: the front end has ended or closed the link.
        """
        return pickle.loads(self._connection.recv_bytes())

    def send(self, message: Any) -> None:
        """Send a message. It is lost if the front end has ended, which `receive` reports."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        frame = memoryview(struct.pack("!i", len(data)) + data)  # the format of `Connection`
        with self._changed:
            if self._is_closed:
                return
            if not self._unsent:
                try:
                    frame = frame[self._pipe.send(frame, socket.MSG_DONTWAIT) :]
                except BlockingIOError:
                    pass
                except OSError:
                    return
            if not frame:
                return
            self._unsent.append(frame)
            if self._writer is None:
                self._writer = threading.Thread(target=self._write, name="to-front-end", daemon=True)
                self._writer.start()
            self._changed.notify()

    def close(self) -> None:
        """Close the link."""
        with self._changed:
            self._is_closed = True
            self._unsent.clear()
            self._changed.notify()
        with contextlib.suppress(OSError):  # the front end has ended
            self._pipe.shutdown(socket.SHUT_RDWR)  # ends a send in another thread
        self._pipe.close()
        self._connection.close()

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._unsent or self._is_closed)
                if self._is_closed:
                    return
                frame = self._unsent[0]
            try:
                self._pipe.sendall(frame)
            except OSError:
                return  # `send` continues to collect messages until `close`, which follows at once
            with self._changed:
                if self._unsent:  # otherwise it was closed
                    self._unsent.popleft()


class FrontEndLinks:
    """All links of this engine. Its methods are called by the engine's main thread, unless stated otherwise.

    Args:
        descriptor: descriptor of the socket over which the supervisor passes links.
        inbox: receives the front ends' messages, and `FrontEndGone`.
    """

    def __init__(self, descriptor: int, inbox: SimpleQueue[Any]) -> None:
        self._passed = socket.socket(fileno=descriptor)
        self._inbox = inbox
        self._lock = threading.Lock()
        self._links: set[FrontEndLink] = set()
        self._state: dict[type, Any] = {}  # for later front ends: the newest message of each kind
        self._owners: dict[str, FrontEndLink] = {}  # by request
        threading.Thread(target=self._accept, name="front-ends", daemon=True).start()

    def report_loading(self, message: MissingRanks | WaitingForNodes) -> None:
        """Report the state of loading to all front ends, also to those that are linked later. Thread-safe."""
        with self._lock:
            self._state[type(message)] = message
            for link in self._links:
                link.send(message)

    def serve(self, info: EngineInfo) -> None:
        """Let all front ends send requests, also those that are linked later."""
        with self._lock:
            self._state = {EngineInfo: info}
            for link in self._links:
                link.send(info)

    def send(self, outputs: StepOutputs) -> StepOutputs:
        """Send each front end its requests' deltas. Return the rest, for the supervisor."""
        deltas_of: dict[FrontEndLink, list[TokenDelta]] = {}
        rest: list[TokenDelta] = []
        for delta in outputs.deltas:
            owner = self._owners.get(delta.request_id)
            deltas = rest if owner is None else deltas_of.setdefault(owner, [])
            deltas.append(delta)
        for link, deltas in deltas_of.items():
            link.send(StepOutputs(deltas, None))
        if outputs.report is not None:
            for finished in outputs.report.finished:
                self._owners.pop(finished.id, None)
        else:  # of requests that never reached the scheduler
            for delta in outputs.deltas:
                self._owners.pop(delta.request_id, None)
        return StepOutputs(rest, outputs.report)

    def forget(self, link: FrontEndLink) -> Sequence[str]:
        """Close the link of a front end, and return the ids of its requests, which must be aborted."""
        with self._lock:
            self._links.discard(link)
        link.close()
        lost = [request_id for request_id, owner in list(self._owners.items()) if owner is link]
        for request_id in lost:
            del self._owners[request_id]
        return lost

    def drop(self, request_id: str) -> None:
        """Forget a request that has been aborted, or that the engine has not accepted."""
        self._owners.pop(request_id, None)

    def _accept(self) -> None:
        while True:
            data, descriptors, _, _ = socket.recv_fds(self._passed, 1, 1)
            if not data:
                return  # the supervisor has ended
            link = FrontEndLink(socket.socket(fileno=descriptors[0]))
            with self._lock:
                self._links.add(link)
                for message in self._state.values():
                    link.send(message)
            threading.Thread(target=self._receive, args=(link,), name="from-front-end", daemon=True).start()

    def _receive(self, link: FrontEndLink) -> None:
        """Move a front end's messages into the inbox until it ends."""
        try:
            while True:
                message = link.receive()
                if isinstance(message, EngineRequest):
                    self._owners[message.id] = link
                elif not isinstance(message, Abort | Stop):
                    raise TypeError(f"{type(message).__name__} is no message of a front end")
                self._inbox.put(message)
        except (EOFError, OSError):
            logger.debug("a front end has closed its link")
        except Exception:  # affects only this front end, which ends when its link is closed
            logger.exception("a front end's message cannot be read")
        self._inbox.put(FrontEndGone(link))
