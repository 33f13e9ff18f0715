"""Ends of a server with several front ends, at any time: no process, folder or socket is left."""

from __future__ import annotations

import re
import signal
import socket
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from stoker_engine.server.front_ends.metrics_folder import metrics_folder

from ....support.processes import lives
from ....support.waiting import until
from .running import Running, crashing_engine, serving, start

_WORDS = ("--api-server-count=2", "--shutdown-grace=0.2")


@pytest.fixture(autouse=True)
def _temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder for temporary files that no other server uses."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))


def _descendants(running: Running) -> list[psutil.Process]:
    return psutil.Process(running.process.pid).children(recursive=True)


def _check_nothing_is_left(running: Running, processes: list[psutil.Process], folder: Path) -> None:
    until(lambda: not any(map(lives, processes)), lambda: f"{[each for each in processes if lives(each)]}")
    if running.url:
        port = int(running.url.rpartition(":")[2])
        with socket.create_server(("127.0.0.1", port)):
            pass
    assert not list((folder / "tmp").glob("stoker-metrics-*"))
    assert not running.has_logged("Traceback"), "".join(running.log)


@pytest.mark.parametrize(
    ("signals", "num_processes"),
    [([signal.SIGINT], 1), ([signal.SIGTERM], 3), ([signal.SIGTERM, signal.SIGTERM], 5)],
    ids=["when the engine starts", "when front ends start", "when tokenizers start"],
)
def test_signals_while_the_server_starts_end_it(
    tiny_llama: Path, tmp_path: Path, signals: list[signal.Signals], num_processes: int
) -> None:
    (tmp_path / "deaths").mkdir()
    (tmp_path / "deaths" / "load").write_text("hang")
    running = start(tiny_llama, *_WORDS, setup=crashing_engine(tmp_path / "deaths"))
    try:
        until(lambda: len(_descendants(running)) >= num_processes, lambda: "".join(running.log))
        processes = _descendants(running)
        for signum in signals:
            running.process.send_signal(signum)
        assert running.ended() == 0, "".join(running.log)
        _check_nothing_is_left(running, processes, tmp_path)
    finally:
        running.process.kill()


def test_a_second_signal_ends_streams_at_once(tiny_llama: Path, tmp_path: Path) -> None:
    setup = crashing_engine(tmp_path / "deaths")
    with serving(tiny_llama, *_WORDS, "--shutdown-timeout=600", setup=setup) as running:
        processes = _descendants(running)
        (engine,) = running.engines()
        streams = [running.stream([5, number], 450) for number in range(6)]
        for stream in streams:
            next(stream)
        engine.suspend()  # the streams do not end by themselves
        running.process.send_signal(signal.SIGTERM)
        until(lambda: running.num_logged("in flight have another") >= 1, lambda: "".join(running.log))
        running.process.send_signal(signal.SIGTERM)
        with ThreadPoolExecutor(6) as pool:
            errors = [each.exception(60) for each in [pool.submit("".join, stream) for stream in streams]]
        assert all(isinstance(error, ConnectionError | httpx.HTTPError) for error in errors)
        assert running.ended() == 0, "".join(running.log)
        _check_nothing_is_left(running, processes, tmp_path)


def test_a_killed_supervisor_leaves_no_process_and_its_folder_to_the_next_one(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    with metrics_folder() as other, serving(tiny_llama, *_WORDS, setup=crashing_engine(tmp_path / "deaths")) as running:
        (abandoned,) = set((tmp_path / "tmp").glob("stoker-metrics-*")) - {other}
        processes = _descendants(running)
        stream = running.stream([5, 6], 450)
        next(stream)
        running.process.kill()
        running.process.wait()
        until(lambda: not any(map(lives, processes)), lambda: f"{[each for each in processes if lives(each)]}")
        assert abandoned.exists()
        with metrics_folder():
            assert other.exists() and not abandoned.exists()
    _check_nothing_is_left(running, processes, tmp_path)


def test_a_folder_for_metrics_that_cannot_be_created_is_reported(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = f"import tempfile; tempfile.tempdir = {str(tmp_path / 'missing')!r}"
    running = start(tiny_llama, *_WORDS, setup=setup)
    assert running.ended() == 1
    assert re.search("cannot create a folder for metrics: .*; set TMPDIR", "".join(running.log))
    assert not running.has_logged("Traceback")
