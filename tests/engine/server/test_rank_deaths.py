"""``stoker serve`` with ranks whose processes are killed and stopped in turn.

Waiting clients get the cause, the whole engine is restarted if permitted, and at the end no process is left.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from stoker_engine.cli.lines import lines_of
from stoker_engine.contract.termination_message import Reason, TerminationMessage

from ...support.processes import command_line
from ...support.waiting import until
from .test_serve_command import SERVE

SIZE = 2
#: Long enough for the start of a rank on a busy machine, in seconds.
STEP_TIMEOUT_S = 30.0
SECONDS = 120.0


class Served:
    """A server process, with the processes that it has started."""

    def __init__(self, model: Path, termination_log: Path, *words: str) -> None:
        self.termination_log = termination_log
        argv = [str(model), "--host=127.0.0.1", "--port=0", "--num-gpu-blocks-override=256", "--device=cpu"]
        argv += [f"--tensor-parallel-size={SIZE}", f"--step-timeout={STEP_TIMEOUT_S}", "--shutdown-grace=0", *words]
        self.seen: dict[int, psutil.Process] = {}
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVE, *argv],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "STOKER_TERMINATION_LOG": str(termination_log)},
        )
        self.lines: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def log(self) -> str:
        """Return its log so far."""
        return "".join(self.lines)

    @property
    def url(self) -> str:
        """Wait until it serves, and return its URL."""
        self.until(lambda: "serving " in self.log or self.process.poll() is not None, "the server serves")
        assert "serving " in self.log, f"the server has ended: {self.log}"
        return next(line.split()[-1] for line in self.lines if "serving " in line)

    def find(self, name: str) -> psutil.Process | None:
        """Return its own process or a current child: ``server``, ``tokenizer``, ``engine``, ``rank 1``."""
        module, _, number = {
            "tokenizer": "stoker_engine.tokens.tokenizer_worker",
            "engine": "stoker_engine.processes.main",
        }.get(name, f"stoker_engine.exec.rank_main {name[5:]}").partition(" ")
        for process in self._all():
            words = command_line(process)
            if name == "server" and process.pid == self.process.pid:
                return process
            if module in words and (not number or words[words.index(module) + 1] == number):
                return process
        return None

    def wait_for(self, name: str) -> psutil.Process:
        """Wait until this process exists, and return it."""
        found: list[psutil.Process] = []

        def find() -> bool:
            if (process := self.find(name)) is not None:
                found.append(process)
            return bool(found)

        self.until(find, f"{name} exists")
        return found[0]

    def ended(self) -> int:
        """Wait until the server has ended, and return its exit code."""
        self.until(lambda: self.process.poll() is not None, "the server has ended")
        return int(self.process.returncode)

    def until(self, condition: Callable[[], bool], description: str) -> None:
        def holds() -> bool:
            if condition():
                return True
            self._all()
            return False

        until(holds, lambda: f"{description}: {self.log}", every=0.02)

    def check_nothing_is_left(self) -> None:
        """Assert that all processes of the server end with it, including stopped ones."""
        self._all()
        self.process.kill()
        self.process.wait()
        self.until(lambda: not any(map(_lives, self.seen.values())), "all processes have ended")

    def _all(self) -> list[psutil.Process]:
        """Return the living processes, and remember all."""
        with contextlib.suppress(psutil.Error):
            server = psutil.Process(self.process.pid)
            self.seen |= {process.pid: process for process in [server, *server.children(recursive=True)]}
        return [process for process in self.seen.values() if _lives(process)]

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines.extend(self.process.stderr)


@contextmanager
def serving(model: Path, folder: Path, *words: str) -> Iterator[Served]:
    """Run a server; at the end neither processes nor shared memory may remain."""
    before = _shared_memory()
    served = Served(model, folder / "termination-log", *words)
    try:
        yield served
    finally:
        served.check_nothing_is_left()
        served.until(lambda: _shared_memory() <= before, "the shared memory is released")  # other tests' too


def _shared_memory() -> set[Path]:
    return set(Path("/dev/shm").iterdir())


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _answer(url: str, max_tokens: int = 4) -> int:
    body = {"prompt": "a", "max_tokens": max_tokens, "ignore_eos": True}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=SECONDS).status_code


@contextmanager
def _in_flight(url: str) -> Iterator[Iterator[str]]:
    """Yield the lines of a stream that has started."""
    body = {"prompt": "a", "max_tokens": 450, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=SECONDS) as answer:
        lines = filter(None, lines_of(answer.iter_bytes()))
        next(lines)
        yield lines


def test_a_dead_rank_is_named_and_the_engine_restarted(tiny_llama: Path, tmp_path: Path) -> None:
    """First under traffic, then while idle; the latter exceeds the permitted restarts."""
    with serving(tiny_llama, tmp_path, "--max-engine-restarts=1", "--log-format=json") as served:
        url = served.url.rstrip('"}')
        first = [served.wait_for(name) for name in ("engine", "rank 0", "rank 1")]
        with _in_flight(url) as lines:
            first[2].kill()
            *_, last = lines
        error = json.loads(last.removeprefix("data: "))["error"]
        assert error["type"] == "internal_error"
        assert f"rank 1 of {SIZE} was killed by signal 9" in error["message"]
        assert _answer(url) == 200, "the request waits for the restarted engine"
        assert not any(map(_lives, first))
        assert f"rank 1 of {SIZE} was killed by signal 9 (SIGKILL)" in served.log
        served.wait_for("rank 0").kill()
        assert served.ended() == 1
        written = TerminationMessage.parse(served.termination_log.read_text())
        assert written is not None
        assert written.reason is Reason.ENGINE_DIED
        assert f"rank 0 of {SIZE} was killed by signal 9 (SIGKILL)" in written.message
        assert "Traceback" not in served.log
        of_ranks = [json.loads(line) for line in served.lines if '"rank"' in line]
        assert {line["rank"] for line in of_ranks} == {0}, "only one rank logs what all of them know"


@pytest.mark.parametrize("traffic", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_stopped_rank_is_named_and_ends_the_server(traffic: bool, tiny_llama: Path, tmp_path: Path) -> None:
    with serving(tiny_llama, tmp_path, "--max-engine-restarts=9") as served:
        url, rank = served.url, served.wait_for("rank 1")
        with contextlib.ExitStack() as stack:
            lines = stack.enter_context(_in_flight(url)) if traffic else iter(())
            rank.suspend()
            for line in lines:
                last = line
        if traffic:
            assert f"rank 1 of {SIZE} was stopped" in json.loads(last.removeprefix("data: "))["error"]["message"]
        assert served.ended() == 1, "the device may be stuck"
        written = TerminationMessage.parse(served.termination_log.read_text())
        assert written is not None
        assert f"rank 1 of {SIZE} was stopped" in written.message
        assert "Traceback" not in served.log


@pytest.mark.parametrize("signum", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_signals_let_running_requests_finish(signum: signal.Signals, tiny_llama: Path, tmp_path: Path) -> None:
    with serving(tiny_llama, tmp_path) as served, _in_flight(served.url) as lines:
        served.process.send_signal(signum)
        *_, finish, done = lines
        assert json.loads(finish.removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert done == "data: [DONE]"
        assert served.ended() == 0
        served.until(lambda: not any(map(_lives, served.seen.values())), "all processes have ended")


PROCESS_KINDS = ("server", "tokenizer", "engine", "rank 0", "rank 1")
#: Cases that are tested in every run.
QUICK = {("rank 1", signal.SIGSTOP, True), ("engine", signal.SIGKILL, False)}


@pytest.mark.parametrize(
    "process_kind, signum, loads",
    [
        pytest.param(kind, signum, loads, marks=() if (kind, signum, loads) in QUICK else pytest.mark.slow)
        for kind in PROCESS_KINDS
        for signum in (signal.SIGKILL, signal.SIGSTOP)
        for loads in (True, False)
    ],
)
def test_no_process_is_left_after_any_of_them_dies_or_stops(
    process_kind: str, signum: signal.Signals, loads: bool, tiny_llama: Path, tmp_path: Path
) -> None:
    """The server recovers, ends by itself, or is killed: afterwards no process is left."""
    chance = random.Random(f"{process_kind} {signum} {loads}")
    with serving(tiny_llama, tmp_path, "--max-engine-restarts=1") as served:
        if loads:
            victim = served.wait_for(process_kind)
            time.sleep(chance.random())  # sleeps: random moment of the death
            victim.send_signal(signum)
            time.sleep(chance.random())  # sleeps: random moment of the next event
        else:
            url, victim = served.url, served.wait_for(process_kind)
            with contextlib.suppress(httpx.HTTPError), _in_flight(url) as lines:
                victim.send_signal(signum)
                for _ in lines if process_kind != "server" else ():
                    pass
        if process_kind == "engine" or process_kind.startswith("rank"):
            served.until(lambda: not _lives(victim), f"{process_kind} has ended")
