"""Front ends that start, or serve, while an engine is dead or cannot be killed."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from stoker_engine.contract.termination_message import Reason, TerminationMessage

from ....support.waiting import until
from .running import Running, crashing_engine, serving

#: A supervisor whose engines survive SIGKILL, as a process in state D does.
_UNKILLABLE = (
    "from stoker_engine.processes import engine_process, watchdog; engine_process._CLOSE_TIMEOUT_S = 0.2; "
    "watchdog.KILL_TIMEOUT_S = 1.0; "
    "engine_process.EngineProcess.kill = lambda self, because: None"
)


def _answers(running: Running, path: str) -> set[tuple[int, str]]:
    """Return the different answers on new connections, so that each front end answers."""
    answers = [running.get(path) for _ in range(20)]
    return {(answer.status_code, answer.text) for answer in answers}


def test_a_replaced_front_end_serves_with_the_engines_that_live(tiny_llama: Path, tmp_path: Path) -> None:
    """Engine 1 of two stays dead, while one of the front ends that saw its death is replaced."""
    words = ("--api-server-count=2", "--data-parallel-size=2", "--max-engine-restarts=0")
    once = "from stoker_engine.server.engine import restarts; restarts.BESIDE_OTHERS = 0"
    with serving(tiny_llama, *words, setup=f"{crashing_engine(tmp_path / 'deaths')}; {once}") as running:
        expected = running.text([5, 6])
        next(each for each in running.engines() if each.cmdline()[-2] == "1").kill()
        until(lambda: running.has_logged("not restarting the engine"), lambda: "".join(running.log))
        running.replace(running.front_ends()[0])
        assert {running.text([5, 6]) for _ in range(8)} == {expected}
        for path in ("/health", "/ready", "/live", "/copies"):
            answers = _answers(running, path)
            assert len(answers) == 1, answers
            ((code, text),) = answers
            assert code == 200
            assert "serving" in text and "the engine is dead" in text and "signal 9" in text
        assert running.metric("stoker:engine_up") == 1
        assert len(running.front_ends()) == 2
        assert not running.has_logged("Traceback")


def test_an_engine_that_cannot_be_killed_ends_the_server(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOKER_TERMINATION_LOG", str(tmp_path / "log"))
    setup = f"{crashing_engine(tmp_path / 'deaths')}; {_UNKILLABLE}"
    with serving(tiny_llama, "--api-server-count=2", "--max-engine-restarts=5", setup=setup) as running:
        (engine,) = running.engines()
        stream = running.stream([5], 450)
        next(stream)
        engine.suspend()
        until(lambda: engine.status() == "stopped")
        assert {code for code, _ in _answers(running, "/health")} == {503}
        with pytest.raises((ConnectionError, httpx.HTTPError)):
            "".join(stream)
        assert running.ended() == 1
        assert not running.has_logged("starting another front end"), "front ends do not end because of an engine"
        engine.kill()
    written = TerminationMessage.parse((tmp_path / "log").read_text())
    assert written is not None
    assert written.reason is Reason.ENGINE_DIED
    assert "was stopped" in written.message
