"""``stoker serve`` as a process: output, termination, exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from stoker_engine.cli.lines import lines_of
from stoker_engine.contract.termination_message import Reason, TerminationMessage

from ...support.certificates import self_signed
from ...support.waiting import until
from ..conftest import engine_of

SERVE = "import sys; from stoker_engine.cli.serve import main; sys.exit(main(sys.argv[1:]))"


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    argv = [sys.executable, "-c", SERVE, *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, env={**os.environ, **environment})


@contextmanager
def serving(model: Path, *words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run the command until it serves; yield the process and the server's URL."""
    argv = [str(model), "--host=127.0.0.1", "--port=0", "--num-gpu-blocks-override=256", *words]
    process = subprocess.Popen([sys.executable, "-c", SERVE, *argv], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if "serving " in line:
                yield process, re.findall(r"https?://[0-9.:]+", line)[0]
                return
        pytest.fail("the server ended before it served")
    finally:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait until the process has ended; return its exit code and the rest of the log."""
    _, log = process.communicate(timeout=60)
    return process.returncode, log


def test_help_names_the_flags() -> None:
    result = run("--help")
    assert result.returncode == 0
    assert "--max-num-seqs" in result.stdout
    assert "--chat-template" in result.stdout


@pytest.mark.parametrize(
    "words, code, message",
    [
        (["m", "--no-such-flag"], 2, "--no-such-flag"),
        (["m", "--block-size=15"], 2, "--block-size"),
        (["m", "--kv-cache-dtype=int3"], 2, "--kv-cache-dtype"),
        ([], 2, "model"),
        (["/no/such/folder", "--port=0"], 2, "/no/such/folder"),
        (["m", "--port=0", "--host=no.such.host.invalid"], 1, "no.such.host.invalid"),
    ],
)
def test_start_errors_are_reported_without_a_traceback(words: list[str], code: int, message: str) -> None:
    result = run(*words)
    assert result.returncode == code, result.stderr
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "words, reason, message",
    [
        (["m", "--no-such-flag"], Reason.START_ERROR, "--no-such-flag"),
        (["m", "--port=0", "--host=no.such.host.invalid"], Reason.START_ERROR, "no.such.host.invalid"),
        (["/no/such/folder", "--port=0"], Reason.MODEL_NOT_FOUND, "/no/such/folder"),
    ],
)
def test_the_termination_message_names_the_cause(
    words: list[str], reason: Reason, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "termination-log"
    assert run(*words, STOKER_TERMINATION_LOG=str(file)).returncode != 0
    written = TerminationMessage.parse(file.read_text())
    assert written is not None
    assert written.reason is reason
    assert message in written.message


def test_an_unwritable_termination_message_changes_nothing(tmp_path: Path) -> None:
    result = run("m", "--no-such-flag", STOKER_TERMINATION_LOG=str(tmp_path))
    assert result.returncode == 2
    assert "Traceback" not in result.stderr


def test_a_port_in_use_is_reported_before_the_model_is_located() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run("/no/such/folder", "--host=127.0.0.1", f"--port={port}")
    assert result.returncode == 1
    assert f"127.0.0.1:{port}" in result.stderr
    assert "Address already in use" in result.stderr
    assert "Traceback" not in result.stderr


def test_sigterm_lets_running_requests_finish(tiny_llama: Path) -> None:
    with serving(tiny_llama, "--served-model-name", "tiny", "alias", "--shutdown-grace=0.5") as (process, url):
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


def test_ctrl_c_skips_the_grace_period_and_probes_are_not_logged(tiny_llama: Path) -> None:
    with serving(tiny_llama, "--shutdown-grace=300") as (process, url):
        for path in ("/health", "/metrics", "/v1/models"):
            httpx.get(url + path)
        process.send_signal(signal.SIGINT)
        code, log = ended(process)  # Ctrl-C skips the grace period
    assert code == 0, log
    assert "/v1/models" in log
    assert "/health" not in log
    assert "/metrics" not in log


def test_sigterm_while_loading_exits_with_0(tiny_llama: Path) -> None:
    argv = [sys.executable, "-c", SERVE, str(tiny_llama), "--port=0"]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as process:
        _until_handled(process.pid, signal.SIGTERM)
        process.terminate()
        code, log = ended(process)
    assert code == 0, log
    assert "Traceback" not in log


def test_sigterm_exits_even_where_exceptions_are_swallowed() -> None:
    """As in callbacks that run while modules are imported."""
    program = """
import os, signal, sys, weakref
from stoker_engine.cli import serve

class Module: pass

def import_something(argv):
    module = Module()
    callback = weakref.ref(module, lambda _: (os.kill(os.getpid(), signal.SIGTERM), sum(range(10_000))))
    del module
    return 3

serve._serve_or_report = import_something
sys.exit(serve.main([]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_dead_engine_ends_the_process(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    termination_log = tmp_path / "termination-log"
    monkeypatch.setenv("STOKER_TERMINATION_LOG", str(termination_log))
    with serving(tiny_llama) as (process, url):
        body = {"prompt": "a", "max_tokens": 450, "ignore_eos": True, "stream": True}
        engine = engine_of(process.pid)
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
            lines = lines_of(answer.iter_bytes())
            next(lines)
            engine.kill()
            *_, last = filter(None, lines)
        assert json.loads(last.removeprefix("data: "))["error"]["type"] == "internal_error"
        code, log = ended(process)
    assert code == 1, log
    assert "signal 9" in log, "the log has the cause"
    written = TerminationMessage.parse(termination_log.read_text())
    assert written is not None
    assert written.reason is Reason.ENGINE_DIED
    assert "signal 9" in written.message
    assert "Traceback" not in log


def test_a_dead_engine_is_restarted_while_requests_wait(tiny_llama: Path) -> None:
    """Only requests in flight fail; one death more than permitted ends the process."""
    with serving(tiny_llama, "--max-engine-restarts=1") as (process, url):
        parent = psutil.Process(process.pid)

        engine = engine_of(process.pid)
        fds = parent.num_fds()

        def answer(max_tokens: int = 1, n: int = 1) -> int:
            body = {"prompt": "a", "max_tokens": max_tokens, "n": n, "ignore_eos": True}
            return httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code

        with ThreadPoolExecutor() as pool:
            in_flight = pool.submit(answer, 450, n=64)  # long enough to be in flight when the engine dies
            until(lambda: _running(httpx.get(f"{url}/metrics").text) >= 1)
            engine.kill()
            assert in_flight.result(60) == 500
            late = [pool.submit(answer) for _ in range(4)]
            assert httpx.get(f"{url}/health").status_code == 503
            assert httpx.get(f"{url}/live").status_code == 200
            assert httpx.get(f"{url}/ready").status_code == 503
            assert [each.result(60) for each in late] == [200] * 4
        assert httpx.get(f"{url}/ready").status_code == 200
        metrics = httpx.get(f"{url}/metrics").text
        assert _running(metrics) == 0
        assert _value(metrics, "stoker:engine_restarts_total") == 1
        assert _value(metrics, "vllm:generation_tokens_total") >= 4, "the counter continues after the restart"
        until(lambda: parent.num_fds() <= fds, "connections and the dead engine's descriptors are closed")
        again = engine_of(process.pid)
        assert again.pid != engine.pid
        again.kill()
        code, log = ended(process)
    assert code == 1, log
    assert "loading the engine again" in log
    assert "Traceback" not in log


def _value(metrics: str, name: str) -> float:
    return next(
        sample.value
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
        if sample.name == name
    )


def _running(metrics: str) -> float:
    return _value(metrics, "vllm:num_requests_running")


def test_https_api_keys_and_json_logs_work_together(tiny_llama: Path, tmp_path: Path) -> None:
    key, certificate = self_signed(tmp_path)
    keys = tmp_path / "keys"
    keys.write_text("sesame\n")
    words = (f"--ssl-keyfile={key}", f"--ssl-certfile={certificate}", f"--api-key-file={keys}", "--log-format=json")
    with serving(tiny_llama, *words) as (process, url):
        assert url.startswith("https://")
        with httpx.Client(verify=ssl.create_default_context(cafile=certificate)) as client:
            assert client.get(f"{url}/v1/models").status_code == 401
            headers = {"authorization": "Bearer sesame", "x-request-id": "mine"}
            body = {"prompt": "hush", "max_tokens": 2, "ignore_eos": True}
            assert client.post(f"{url}/v1/completions", json=body, headers=headers).status_code == 200
        process.send_signal(signal.SIGINT)
        code, log = ended(process)
    assert code == 0, log
    lines = [json.loads(line) for line in log.strip("\n").split("\n")]
    assert all({"timestamp", "level", "logger", "message"} <= line.keys() for line in lines)
    (written,) = [line for line in lines if line["logger"] == "stoker_engine.requests"]
    assert written["request_id"] == "mine" and "finished cmpl-mine-" in written["message"]
    assert (written["finish_reason"], written["output_tokens"], written["n"]) == ("length", 2, 1)
    assert written["e2e_s"] >= written["ttft_s"] >= written["queue_s"] >= 0
    assert any(line.get("request_id") == "mine" for line in lines if line["logger"] == "uvicorn.access")
    assert "hush" not in log
    assert "sesame" not in log


@pytest.mark.parametrize("words", [["--ssl-certfile=/no/such.pem"], ["--api-key-file=/no/such"], ["--ssl-keyfile=x"]])
def test_missing_files_are_reported_without_a_traceback(tiny_llama: Path, words: list[str]) -> None:
    result = run(str(tiny_llama), "--port=0", *words)
    assert result.returncode == 2, result.stderr
    assert words[0].partition("=")[0].replace("keyfile", "certfile") in result.stderr
    assert "Traceback" not in result.stderr


def _until_handled(pid: int, signum: signal.Signals) -> None:
    """Wait until a process has a handler for a signal."""

    def handles() -> bool:
        caught = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "SigCgt" in line)
        return bool(int(caught.split()[1], 16) >> (signum - 1) & 1)

    until(handles, "the process handles the signal")


def test_two_engines_answer_like_one(tiny_llama: Path) -> None:
    """Outputs equal a single engine's, in any order of requests; SIGTERM waits for both, and leaves no process."""
    body = {"max_tokens": 16, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    prompts = [[5, 6, 7 + i % 3, *range(3, 3 + 9 * (i % 5))] for i in range(12)]

    def ask(url: str, prompt: list[int], **changed: object) -> tuple[int, str]:
        answer = httpx.post(f"{url}/v1/completions", json={**body, "prompt": prompt, **changed}, timeout=60)
        return answer.status_code, answer.json()["choices"][0]["text"]

    with ThreadPoolExecutor(12) as pool:
        with serving(tiny_llama) as (_, url):
            expected = list(pool.map(lambda prompt: ask(url, prompt), prompts))
        with serving(tiny_llama, "--data-parallel-size=2", "--log-format=json") as (process, url):
            assert list(pool.map(lambda prompt: ask(url, prompt), prompts)) == expected
            up = re.findall(r"^stoker:engine_up\{.*\} ([0-9.]+)$", httpx.get(f"{url}/metrics").text, re.MULTILINE)
            assert up == ["1.0", "1.0"]
            children = psutil.Process(process.pid).children(recursive=True)
            answers = [pool.submit(ask, url, prompt, max_tokens=200) for prompt in prompts]
            until(lambda: _running(httpx.get(f"{url}/metrics").text) >= 2)
            process.send_signal(signal.SIGTERM)
            assert [future.result()[0] for future in answers] == [200] * len(prompts)
            code, log = ended(process)
    assert code == 0
    assert "Traceback" not in log
    assert not psutil.wait_procs(children, timeout=120)[1]


def test_unsupported_engine_options_are_refused_at_start(tiny_llama: Path) -> None:
    result = run(str(tiny_llama), "--data-parallel-size=2", "--enable-expert-parallel", "--port=0")
    assert result.returncode == 2
    assert "--enable-expert-parallel" in result.stderr and "Traceback" not in result.stderr
