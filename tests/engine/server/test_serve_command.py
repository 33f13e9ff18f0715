"""``stoker serve`` as a process: what it prints, how it stops, with which exit code."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from openai import OpenAI

SERVE = "import sys; from stoker_engine.cli.serve import main; sys.exit(main(sys.argv[1:]))"

#: Serves as SERVE does, but the engine's step raises once it has run 20 times.
SERVE_AND_DIE = """
import itertools, sys
from stoker_engine import engine
from stoker_engine.cli.serve import main
step, steps = engine.Engine.step, itertools.count()
def dying(self):
    if next(steps) == 20:
        raise ZeroDivisionError("a step of this test's engine")
    return step(self)
engine.Engine.step = dying
sys.exit(main(sys.argv[1:]))
"""


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """Runs the command to its end."""
    return subprocess.run([sys.executable, "-c", SERVE, *words], capture_output=True, text=True, timeout=60)


@contextmanager
def serving(model: Path, *words: str, code: str = SERVE) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Runs the command until it serves; yields the process and the server's URL."""
    argv = [str(model), "--host=127.0.0.1", "--port=0", "--num-gpu-blocks-override=256", *words]
    process = subprocess.Popen([sys.executable, "-c", code, *argv], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if "serving " in line:
                yield process, line.split()[-1]
                return
        pytest.fail("it ended before it served")
    finally:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and the rest of the log."""
    _, log = process.communicate(timeout=60)
    return process.returncode, log


def test_help_names_the_flags() -> None:
    result = run("--help")
    assert result.returncode == 0
    assert "--max-num-seqs" in result.stdout
    assert "--chat-template" in result.stdout


@pytest.mark.parametrize(
    "words, code, says",
    [
        (["m", "--no-such-flag"], 2, "--no-such-flag"),
        (["m", "--block-size=15"], 2, "--block-size"),
        (["m", "--kv-cache-dtype=int3"], 2, "--kv-cache-dtype"),
        ([], 2, "model"),
        (["/no/such/folder", "--port=0"], 2, "/no/such/folder"),
        (["m", "--port=0", "--host=no.such.host.invalid"], 1, "no.such.host.invalid"),
    ],
)
def test_a_mistake_is_told_in_a_sentence(words: list[str], code: int, says: str) -> None:
    result = run(*words)
    assert result.returncode == code, result.stderr
    assert says in result.stderr
    assert "Traceback" not in result.stderr


def test_a_port_in_use_is_told_before_the_model_is_looked_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run("/no/such/folder", "--host=127.0.0.1", f"--port={port}")
    assert result.returncode == 1
    assert f"127.0.0.1:{port}" in result.stderr
    assert "Address already in use" in result.stderr
    assert "Traceback" not in result.stderr


def test_told_to_stop_it_finishes_what_it_began(tiny_llama: Path) -> None:
    with serving(tiny_llama, "--served-model-name", "tiny", "alias") as (process, url):
        assert httpx.get(f"{url}/health").status_code == 200
        client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        assert [model.id for model in client.models.list()] == ["tiny", "alias"]
        stream = client.completions.create(
            model="alias", prompt="a", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)
        process.terminate()
        *_, last = stream
        assert last.choices[0].finish_reason == "length"
        client.close()
        code, log = ended(process)
    assert code == 0, log
    assert "Traceback" not in log


def test_ctrl_c_stops_it_and_probes_leave_no_trace(tiny_llama: Path) -> None:
    with serving(tiny_llama) as (process, url):
        for path in ("/health", "/metrics", "/v1/models"):
            httpx.get(url + path)
        process.send_signal(signal.SIGINT)
        started = time.monotonic()
        code, log = ended(process)
    assert code == 0, log
    assert time.monotonic() - started < 10
    assert "/v1/models" in log
    assert "/health" not in log
    assert "/metrics" not in log


def test_stopped_while_it_loads(tiny_llama: Path) -> None:
    argv = [sys.executable, "-c", SERVE, str(tiny_llama), "--port=0"]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as process:
        _until_handled(process.pid, signal.SIGTERM)
        process.terminate()
        code, log = ended(process)
    assert code == 0, log
    assert "Traceback" not in log


def test_a_dead_engine_ends_the_process(tiny_llama: Path) -> None:
    with serving(tiny_llama, code=SERVE_AND_DIE) as (process, url):
        body = {"prompt": "a", "max_tokens": 100, "ignore_eos": True, "stream": True, "return_token_ids": True}
        answer = httpx.post(f"{url}/v1/completions", json=body)
        assert answer.text.count('"text"') == 20
        assert '"error"' in answer.text.split("\n\n")[-2]
        code, log = ended(process)
    assert code == 1, log
    assert "a step of this test's engine" in log, "the log has the cause, the client has not"
    assert "ZeroDivisionError" not in answer.text


def _until_handled(pid: int, signum: signal.Signals) -> None:
    """Waits until a process has a handler for a signal."""
    for _ in range(3000):
        caught = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "SigCgt" in line)
        if int(caught.split()[1], 16) >> (signum - 1) & 1:
            return
        time.sleep(0.01)
    pytest.fail("it never handled the signal")
