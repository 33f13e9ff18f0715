"""A front end whose link to an engine is broken; its supervisor is the test."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import ExitStack
from multiprocessing.connection import Connection

import pytest

from stoker_common.errors import EngineDeadError
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.contract.serve_args import ServeArgs
from stoker_engine.server.engine.peers import SharedCounts
from stoker_engine.server.front_ends.control import ControlPipe, Start
from stoker_engine.server.front_ends.supervised import Supervised


def test_broken_links_ask_their_front_end_once_to_end_and_do_not_report_a_fatal_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    signals: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, signum: signals.append((pid, signum)))
    monkeypatch.setattr(Supervised, "_die", lambda self: None)  # otherwise the end of the pipe ends this process
    with ExitStack() as opened:
        supervisor, control = socket.socketpair()
        links = [opened.enter_context(each) for each in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)]
        pipe = opened.enter_context(Connection(supervisor.detach()))
        args = ServeArgs(EngineArgs("m", data_parallel_size=2))
        pipe.send(Start(args, index=0, name="0", created=0, min_engines=2))
        supervised = Supervised(ControlPipe(control), links[1], SharedCounts(2).fd)
        for engine in (0, 1, 0):
            supervised.link(engine).fail(EngineDeadError("it could not be written to"))
        assert signals == [(os.getpid(), signal.SIGTERM)], "a second signal would end requests in flight"
        supervised.on_ready()
        assert type(pipe.recv()).__name__ == "Ready", "`Failed` would end the server while it starts"
        links[0].shutdown(socket.SHUT_RDWR)
