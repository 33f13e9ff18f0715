"""The pipe to an engine process, with any content, and its end by any cause."""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stoker_common.errors import EngineDeadError, EngineKilledError, EngineStuckError
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.core.engine_info import EngineInfo
from stoker_engine.processes import engine_process
from stoker_engine.processes.engine_process import EngineProcess
from stoker_engine.processes.heartbeat import Phase

from ...support.waiting import until

_PROGRAM = """
import os, pickle, signal, sys, time
from multiprocessing.connection import Connection
from stoker_engine.processes.heartbeat import Phase, Heartbeat
connection, word = Connection(int(sys.argv[1])), Heartbeat(int(sys.argv[2]))
"""

CRASHING_ENGINE = Path(__file__).with_name("crashing_engine.py")

LARGE = 1 << 20  #: bytes; more than a pipe's capacity


class Listener:
    """An engine process that runs `body`, with the received messages."""

    def __init__(self, body: str, on_message: Callable[[Any], None] | None = None) -> None:
        self.heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.process = EngineProcess(program=("-c", _PROGRAM + body))
        self.process.listen(on_message or self.heard.put, self.heard.put)

    def hear(self) -> Any:
        return self.heard.get(timeout=60)

    def until(self, condition: Callable[[], bool]) -> None:
        until(condition)


Listen = Callable[..., Listener]


@pytest.fixture
def listen() -> Iterator[Listen]:
    made: list[Listener] = []

    def make(*args: Any) -> Listener:
        made.append(Listener(*args))
        return made[-1]

    yield make
    for listener in made:
        listener.process.close()


@pytest.mark.parametrize(
    "number, kind, words",
    [
        (9, EngineKilledError, "SIGKILL"),
        (15, EngineKilledError, "SIGTERM"),
        (40, EngineKilledError, "Real-time signal 6"),
        (64, EngineKilledError, "SIGRTMAX"),
        (33, EngineKilledError, "signal 33"),
        (11, EngineDeadError, "SIGSEGV"),
        (6, EngineDeadError, "SIGABRT"),
    ],
)
def test_every_signal_is_a_death_with_its_name(
    listen: Listen, number: int, kind: type[EngineDeadError], words: str
) -> None:
    """Python's enum of signals lacks the real-time ones."""
    death = listen(f"os.kill(os.getpid(), {number})").hear()
    assert type(death) is kind
    assert f"signal {number}" in str(death) and words in str(death)


@pytest.mark.parametrize(
    "body, words",
    [
        ("connection.send_bytes(b'junk')", "UnpicklingError"),
        ("connection.send_bytes(b'')", "EOFError"),
        ("connection.send_bytes(pickle.dumps(print)[:-1])", "could not be handled"),
        ("connection.send_bytes(b'cno_such_module\\nClass\\n.')", "ModuleNotFoundError"),
        ("connection.send_bytes(b'cos\\nrmdir\\n(V/no/such/folder\\ntR.')", "FileNotFoundError"),
        ("connection.send_bytes(b'cbuiltins\\nexit\\n(tR.')", "SystemExit"),
    ],
)
def test_an_unreadable_message_is_a_death(listen: Listen, body: str, words: str) -> None:
    death = listen(f"{body}\ntime.sleep(100)").hear()
    assert isinstance(death, EngineDeadError)
    assert words in str(death)


@pytest.mark.parametrize(
    "error", [ValueError("ours"), OSError("the disk is full"), EOFError(), MemoryError()], ids=repr
)
def test_an_error_in_the_message_handler_is_a_death(listen: Listen, error: Exception) -> None:
    def fail(_: Any) -> None:
        raise error

    listener = listen("connection.send('hello')\ntime.sleep(100)", fail)
    death = listener.hear()
    assert isinstance(death, EngineDeadError)
    assert f"{type(error).__name__}: {error}" in str(death)
    assert not listener.process.is_running


@pytest.mark.parametrize("length", [1, 3, 4, 5, 50_000])
def test_half_a_message_reports_the_death_of_its_sender(listen: Listen, length: int) -> None:
    body = f"os.write(connection.fileno(), ((60_000).to_bytes(4, 'big') + bytes(60_000))[:{length}])\nos._exit(7)"
    assert "exit code 7" in str(listen(body).hear())


def test_an_unsendable_message_affects_no_other(listen: Listen) -> None:
    listener = listen("while True: connection.send(connection.recv())")
    with pytest.raises(Exception, match="pickle"):
        listener.process.send(lambda: None)
    listener.process.send("hello")
    assert listener.hear() == "hello"


def test_a_failed_write_to_the_pipe_is_a_death(listen: Listen, monkeypatch: pytest.MonkeyPatch) -> None:
    listener = listen("time.sleep(100)")
    monkeypatch.setattr(listener.process._connection, "send_bytes", lambda _: 1 / 0)
    listener.process.send("hello")
    death = listener.hear()
    assert "ZeroDivisionError" in str(death)


def test_a_process_that_closes_its_pipe_is_killed(listen: Listen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "_CLOSE_TIMEOUT_S", 0.2)
    assert "closed its pipe" in str(listen("connection.close()\nos.closerange(3, 99)\ntime.sleep(100)").hear())


def test_a_process_that_cannot_be_killed_is_left_behind(
    listen: Listen, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A process in a hanging kernel driver survives SIGKILL."""
    monkeypatch.setattr(engine_process, "_CLOSE_TIMEOUT_S", 0.1)
    listener = listen("connection.close()\nos.closerange(3, 99)\ntime.sleep(100)")
    kill = listener.process._process.kill
    monkeypatch.setattr(listener.process._process, "kill", lambda: None)
    death = listener.hear()
    assert isinstance(death, EngineStuckError)
    assert "cannot be killed" in str(death)
    listener.process.close()
    assert "left behind" in caplog.text
    kill()


_FLOOD = f"""
while True:
    word.enter(Phase.SENDING)
    connection.send(bytes({LARGE}))
    word.enter(Phase.STEPPING)
"""


def test_an_engine_that_waits_for_its_reader_is_not_busy(listen: Listen) -> None:
    """The engine sends continuously; the reader handles the first message until the test releases it."""
    taken, released = threading.Event(), threading.Event()

    def take(_: Any) -> None:
        taken.set()
        released.wait(60)

    listener = listen(_FLOOD, take)
    process = listener.process
    taken.wait(60)
    listener.until(lambda: process.status.phase is Phase.SENDING)
    before = process.status.busy_for
    listener.until(lambda: process.status.busy_for > before + 0.3)
    assert process.busy_for == 0
    assert process.handling_for >= 0.3, "this side is handling a message"
    released.set()
    listener.until(lambda: process.handling_for < 0.3)
    assert process.busy_for < 0.3, "time spent waiting for the reader never counts"


@pytest.mark.parametrize("half", ["", "os.write(connection.fileno(), (99).to_bytes(4, 'big') + b'half')"])
def test_an_engine_that_hangs_while_it_sends_is_busy(listen: Listen, half: str) -> None:
    listener = listen(f"word.enter(Phase.SENDING)\n{half}\ntime.sleep(100)")
    listener.until(lambda: listener.process.busy_for > 0.3)
    assert listener.process.handling_for == 0
    listener.process.kill(EngineStuckError("it hung"))
    assert str(listener.hear()) == "it hung"


@pytest.mark.parametrize("data, words", [(b"junk", "UnpicklingError"), (b"", "EOFError"), (b"I5\n.", "int is no")])
def test_the_engine_exits_with_the_error_of_an_unusable_message(tmp_path: Path, data: bytes, words: str) -> None:
    """The process exits with the error, while loading and while serving: otherwise later messages would be ignored."""
    for loaded in (False, True):
        heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
        process = EngineProcess(program=("-P", str(CRASHING_ENGINE), str(tmp_path)))
        process.listen(heard.put, heard.put)
        if loaded:
            process.send(EngineArgs("/a/model"))
            assert isinstance(heard.get(timeout=60), EngineInfo)
        process._outbox.put(data)
        death = heard.get(timeout=60)
        process.close()
        assert isinstance(death, EngineDeadError) and words in str(death)


def test_a_stopped_process_is_detected_and_may_continue(listen: Listen) -> None:
    listener = listen("word.enter(Phase.IDLE)\nsignal.raise_signal(signal.SIGSTOP)\nconnection.send('hello')")
    listener.until(lambda: listener.process.is_stopped)
    assert not listener.process.is_running
    listener.process._process.send_signal(signal.SIGCONT)
    assert listener.hear() == "hello"
