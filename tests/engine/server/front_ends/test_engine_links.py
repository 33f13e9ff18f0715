"""What front ends learn of the engines' processes, from their supervisor's links; engines are not started."""

from __future__ import annotations

import pickle
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from stoker_common.errors import EngineDeadError, EngineKilledError, EngineStuckError
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.contract.serve_args import ServeArgs
from stoker_engine.processes.heartbeat import Heartbeat
from stoker_engine.server.front_ends import engine_links
from stoker_engine.server.front_ends.control import EngineDied, EngineLinked
from stoker_engine.server.front_ends.engine_links import EngineLinks

CAUSE = EngineKilledError("it was killed by signal 9")


class Process:
    """An engine's process that is started, and dies when the test says so."""

    def __init__(self, log_format: str, program: Any, step_timeout: float, engine: int | None, on_death: Any) -> None:
        self.pid, self.status, self._on_death = 7, Heartbeat(), on_death

    def link(self, pipe: socket.socket) -> None: ...

    def die(self, cause: EngineDeadError) -> None:
        self._on_death(self, cause)


class FrontEnd:
    """Keeps what it is sent."""

    def __init__(self, opened: ExitStack) -> None:
        self.links, self._received = map(opened.enter_context, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        self._received.setblocking(False)
        self.sent: list[object] = []

    def send(self, message: object) -> None:
        self.sent.append(message)

    def linked(self) -> list[EngineLinked | EngineDied]:
        """Return the messages that came with links since the last call."""
        messages = []
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(self._received, 4096, 2)
            except BlockingIOError:
                return messages
            for descriptor in descriptors:
                socket.close(descriptor)
            messages.append(pickle.loads(data))
            assert len(descriptors) == (2 if isinstance(messages[-1], EngineLinked) else 0)


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def test_front_ends_are_linked_to_each_newest_process_and_learn_each_death_once(
    opened: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_links, "EngineProcess", Process)
    links: Any = EngineLinks(ServeArgs(EngineArgs("m", data_parallel_size=2)))
    first, late, last = (FrontEnd(opened) for _ in range(3))
    dying, living = links.start(0), links.start(1)
    links.add(first)
    assert first.linked() == [EngineLinked(0, 0, 7), EngineLinked(1, 0, 7)]
    dying.die(CAUSE)
    assert [(each.engine, each.serial) for each in first.sent] == [(0, 0)]
    links.add(late)
    (dead, other) = late.linked()
    assert isinstance(dead, EngineDied)
    assert (dead.engine, dead.serial, str(dead.cause)) == (0, 0, str(CAUSE))
    assert other == EngineLinked(1, 0, 7)
    links.start(0)
    assert first.linked() == late.linked() == [EngineLinked(0, 1, 7)]
    assert not links.is_newest(0, 0) and links.is_newest(0, 1)
    links.report_dead(1, EngineStuckError("it cannot be killed"))
    assert [(each.engine, each.serial, str(each.cause)) for each in first.sent[1:]] == [(1, 0, "it cannot be killed")]
    links.add(later := FrontEnd(opened))
    assert [type(each) for each in later.linked()] == [EngineLinked, EngineDied]
    living.die(CAUSE)  # later it does end
    links.start(1)
    living.die(CAUSE)
    assert len(first.sent) == 2
    links.remove(first)
    links.add(last)
    assert last.linked() == [EngineLinked(0, 1, 7), EngineLinked(1, 1, 7)]
    assert len(first.linked()) == 1, "a front end that has ended gets no links"
