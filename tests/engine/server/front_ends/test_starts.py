"""Front ends and engines that fail while a server with several front ends starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker_engine.contract.termination_message import Reason, TerminationMessage

from ....support.certificates import self_signed
from .running import crashing_engine, start

_FRONT_END = "from stoker_engine.server.front_ends import front_end_process as process, supervisor"


def _front_end(program: str) -> str:
    """Return the setup of a server whose front ends run a program instead of their own."""
    return f"{_FRONT_END}; process.PROGRAM = ('-c', {program!r})"


def _termination_message(file: Path) -> TerminationMessage:
    written = TerminationMessage.parse(file.read_text())
    assert written is not None
    return written


@pytest.mark.parametrize(
    ("program", "limits", "cause"),
    [
        ("import os; os._exit(3)", "pass", "its exit code is 3"),
        (
            "import signal; signal.pause()",
            "process._START_CHECKS, process._SILENT_CHECKS, supervisor._CHECK_S = 1, 1, 0.05",
            "it did not answer, and was killed",
        ),
    ],
    ids=["exits", "hangs"],
)
def test_front_ends_that_fail_again_and_again_end_the_server(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, limits: str, cause: str
) -> None:
    monkeypatch.setenv("STOKER_TERMINATION_LOG", str(tmp_path / "log"))
    setup = f"{crashing_engine(tmp_path / 'deaths')}; {_front_end(program)}; {limits}"
    running = start(tiny_llama, "--api-server-count=2", setup=setup)
    assert running.ended() == 1
    log = "".join(running.log)
    assert f"front ends ended too often; the last one: {cause}" in log
    assert "Traceback" not in log
    assert log.count("starting another front end") == 3
    message = _termination_message(tmp_path / "log")
    assert (message.reason, cause in message.message) == (Reason.START_ERROR, True)


@pytest.mark.parametrize(
    ("count", "words", "flag"),
    [
        *((count, ["--api-key-file=/no/such"], "--api-key-file") for count in (1, 2)),
        *((count, ["--ssl-certfile=/no/such"], "--ssl-certfile") for count in (1, 2)),
        (1, ["--admin-api-key-file=/no/such", "--enable-lora", "--lora-dir=/"], "--admin-api-key-file"),
        (1, ["--ssl-certfile=cert.pem", "--ssl-keyfile=key.pem"], "--ssl-keyfile: the key is encrypted"),
    ],
)
def test_wrong_files_are_reported_before_any_process_starts(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, words: list[str], flag: str
) -> None:
    monkeypatch.setenv("STOKER_TERMINATION_LOG", str(tmp_path / "log"))
    monkeypatch.chdir(tmp_path)
    if "encrypted" in flag:
        self_signed(tmp_path, password="secret")
    running = start(
        tiny_llama, f"--api-server-count={count}", *words, setup="import subprocess; subprocess.Popen = None"
    )
    assert running.ended() == 2
    assert running.has_logged(flag)
    assert not running.has_logged("Traceback")
    assert _termination_message(tmp_path / "log").reason is Reason.START_ERROR


def test_an_error_that_front_ends_report_ends_the_server(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOKER_TERMINATION_LOG", str(tmp_path / "log"))
    program = """
import os, socket, sys
from stoker_common.errors import ArgumentError
from stoker_common.subprocesses.load_failed import LoadFailed
from stoker_engine.server.front_ends.control import ControlPipe, Failed
pipe = ControlPipe(socket.socket(fileno=int(sys.argv[1])))
pipe.listen(print, print)
pipe.send(Failed(LoadFailed.of(ArgumentError("--host", "a planned error"))))
pipe.flush()
os._exit(1)
"""
    setup = f"{crashing_engine(tmp_path / 'deaths')}; {_front_end(program)}"
    running = start(tiny_llama, "--api-server-count=2", setup=setup)
    assert running.ended() == 2
    assert running.num_logged("--host: a planned error") == 1, "".join(running.log)
    assert not running.has_logged("Traceback")
