"""The commands as processes, on a tiny model."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from stoker_engine.cli.lines import lines_of

from ...support.waiting import until
from ..conftest import engine_of


def test_bench_serve_measures_a_server(server: str, command: Any, tiny_llama: Path, tmp_path: Path) -> None:
    figures_file = tmp_path / "figures.json"
    result = command(
        "bench", "serve", f"--base-url={server}", f"--tokenizer={tiny_llama}", "--num-prompts=12", "--disable-tqdm",
        "--random-input-len=10", "--random-output-len=5", "--request-rate=100", f"--output-json={figures_file}",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "P99 TTFT (ms):" in result.stdout
    figures = json.loads(figures_file.read_text())
    assert figures["completed"] == 12
    assert figures["total_input_tokens"] == 120
    assert figures["total_output_tokens"] == 60
    assert 0 < figures["mean_ttft_ms"] < figures["mean_e2el_ms"]
    assert figures["p50_itl_ms"] <= figures["p99_itl_ms"]
    mean = figures["mean_ttft_ms"] + 4 * figures["mean_tpot_ms"]
    assert figures["mean_e2el_ms"] == pytest.approx(mean), "a request is its first token and four more"


def test_bench_serve_reports_the_servers_error(server: str, command: Any, tiny_llama: Path) -> None:
    words = (f"--base-url={server}/v1", f"--tokenizer={tiny_llama}", "--random-input-len=9999")
    result = command("bench", "serve", *words)
    assert result.returncode == 1
    assert "maximum context length" in result.stderr


def test_chat_prints_the_servers_answer(server: str, command: Any) -> None:
    quick = command("chat", f"--url={server}/v1", "--quick=hello", "--max-tokens=5", "--temperature=0")
    assert quick.returncode == 0, quick.stderr
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "temperature": 0}
    answer = httpx.post(f"{server}/v1/chat/completions", json=body, timeout=60).json()
    assert quick.stdout == answer["choices"][0]["message"]["content"] + "\n"
    talk = command("chat", f"--url={server}/v1", "--max-tokens=5", "--temperature=0", stdin="hello\n")
    assert talk.returncode == 0, talk.stderr
    assert answer["choices"][0]["message"]["content"] in talk.stdout
    without_path = command("chat", f"--url={server}", "--quick=hello", "--max-tokens=5", "--temperature=0")
    assert without_path.stdout == quick.stdout
    wrong = command("chat", f"--url={server}/v1", "--model-name=nobody", "--quick=hello")
    assert wrong.returncode == 1
    assert "nobody" in wrong.stderr
    nowhere = command("chat", "--url=http://127.0.0.1:9/v1", "--quick=hello")
    assert nowhere.returncode == 1
    assert "does not answer" in nowhere.stderr


def test_run_batch_answers_every_line(command: Any, tiny_llama: Path, tmp_path: Path) -> None:
    def line(custom_id: Any, **body: Any) -> str:
        request = {
            "custom_id": custom_id,
            "method": "POST",
            "url": "/v1/completions",
            "body": {"max_tokens": 4, **body},
        }
        return json.dumps(request)

    lines = [
        *(line(f"good-{i}", prompt=f"the {i}", temperature=0) for i in range(20)),
        line("bad", prompt="the", temperature=-1),
        line("streamed", prompt="the", stream=True),
        line(7, prompt="the"),
        "no JSON",
        '{"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": []}}',
        json.dumps(
            {
                "custom_id": "response",
                "method": "POST",
                "url": "/v1/responses",
                "body": {"input": "the", "max_output_tokens": 4},
            }
        ),
        '{"custom_id": "elsewhere", "method": "POST", "url": "/health", "body": {}}',
    ]
    source, sink = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"\n".join([*(text.encode() for text in lines), b"\xff\xfe", b""]))
    result = command(
        "run_batch", "-i", str(source), "-o", str(sink), "--model", str(tiny_llama), "--num-gpu-blocks-override=256",
        "--disable-tqdm", "--chat-template={% for m in messages %}{{ m.content }}{% endfor %}",
    )  # fmt: skip
    assert result.returncode == 1, result.stderr
    assert "7 lines failed" in result.stderr
    answers = [json.loads(text) for text in sink.read_text().strip("\n").split("\n")]
    assert len(answers) == 28
    by_id = {answer["custom_id"]: answer for answer in answers}
    for i in range(20):
        response = by_id[f"good-{i}"]["response"]
        assert response["status_code"] == 200
        assert response["body"]["usage"]["completion_tokens"] == 4
    assert by_id["bad"]["response"]["status_code"] == 400
    assert by_id["bad"]["response"]["body"]["error"]["param"] == "temperature"
    for custom_id in ("streamed", 7, "elsewhere"):
        assert by_id[custom_id]["error"]["message"]
    assert by_id["chat"]["response"]["status_code"] == 400
    assert by_id["response"]["response"]["body"]["usage"]["output_tokens"] == 4


def test_bench_throughput_and_latency_write_figures(command: Any, tiny_llama: Path, tmp_path: Path) -> None:
    figures_file = tmp_path / "figures.json"
    common = [str(tiny_llama), "--num-gpu-blocks-override=256", "--disable-tqdm", f"--output-json={figures_file}"]
    result = command(
        "bench", "throughput", *common, "--profile", "--dataset-name=prefix_repetition", "--num-prompts=10",
        "--prefix-repetition-prefix-len=32", "--prefix-repetition-suffix-len=8", "--prefix-repetition-num-prefixes=1",
        "--prefix-repetition-output-len=6",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "Sampler:" in result.stdout
    figures = json.loads(figures_file.read_text())
    assert figures["num_output_tokens"] == 60
    assert figures["num_cached_tokens"] == 9 * 32, "the prefix is computed once"
    assert sum(figures["profile_seconds"].values()) == pytest.approx(figures["elapsed_time"])
    assert all(seconds > 0 for seconds in figures["profile_seconds"].values())
    result = command(
        "bench", "latency", *common, "--batch-size=2", "--input-len=8", "--output-len=4", "--num-iters=3",
        "--num-iters-warmup=1",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert len(json.loads(figures_file.read_text())["latencies"]) == 3


def _becomes(url: str, status: int) -> bool:
    """Return whether a probe eventually has this status."""
    return until(lambda: httpx.get(url, timeout=60).status_code == status, f"{url} answers with {status}", every=0.02)


def test_a_stopped_engine_fails_its_probes_and_a_killed_one_ends_streams_and_the_server(
    serve: Any, tiny_llama: Path
) -> None:
    with serve(tiny_llama) as (process, url):
        engine = engine_of(process.pid).pid
        assert "libtorch" in Path(f"/proc/{engine}/maps").read_text()
        assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text(), "the server needs no torch"
        for signum, health in ((signal.SIGSTOP, 503), (signal.SIGCONT, 200)):
            os.kill(engine, signum)
            for path in ("/health", "/ready", "/live"):
                assert _becomes(f"{url}{path}", health), f"{path} after {signum.name}"
        body = {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
            events = lines_of(answer.iter_bytes())
            next(events)
            os.kill(engine, signal.SIGKILL)
            remaining = list(events)
            assert '"error"' in "".join(remaining), "a broken stream must end with an error"
        _, log = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "SIGKILL" in log
    assert "Traceback" not in log
