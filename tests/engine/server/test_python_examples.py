"""The scripts of examples/python run as their docstrings say, on a tiny random model."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stoker_engine.cli.bench import main as bench

EXAMPLES = Path(__file__).parents[3] / "examples"
REVIEW = r"Review\(sentiment='(positive|neutral|negative)', stars=[1-5]\)"


def main_of(name: str) -> Callable[..., None]:
    """Return the main function of a script."""
    return runpy.run_path(str(EXAMPLES / "python" / name))["main"]  # type: ignore[no-any-return]


def test_offline_batch_writes_a_result_per_prompt(tiny_llama: Path, tmp_path: Path) -> None:
    source, target = EXAMPLES / "python/prompts.jsonl", tmp_path / "results.jsonl"
    main_of("offline_batch.py")(str(source), str(target), str(tiny_llama))
    requests, results = ([json.loads(line) for line in path.open()] for path in (source, target))
    assert [result["prompt"] for result in results] == [request["prompt"] for request in requests]
    assert all(
        0 < result["tokens"] <= request["output_tokens"] for request, result in zip(requests, results, strict=True)
    )
    assert {result["finish_reason"] for result in results} <= {"stop", "length"}


def test_streaming_client_prints_text_and_times(address: str, capsys: Any) -> None:
    main_of("streaming_client.py")("What is a steam engine?", address)
    shown = capsys.readouterr()
    assert shown.out.strip()
    assert re.search(r"\d+ tokens in \d+\.\d\d s, the first after \d+\.\d\d s", shown.err)


def test_tool_calls_example_calls_its_tool(address: str, capsys: Any) -> None:
    main_of("tool_calls.py")(address)
    call, answer = capsys.readouterr().out.split("\n", maxsplit=1)
    assert re.match(r'call: Weather\({.*"(Oslo|Paris|Rome)"\s*}\) -> {.*celsius.*}', call)
    assert answer.startswith("answer: ")


def test_structured_output_examples_print_valid_reviews(address: str, tiny_llama: Path, capsys: Any) -> None:
    main_of("structured_output.py")(address)
    main_of("structured_output_offline.py")(str(tiny_llama))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert all(re.fullmatch(REVIEW, line) for line in lines)


@pytest.mark.parametrize("name", ["streaming_client", "structured_output", "tool_calls"])
def test_clients_report_that_no_server_answers(name: str) -> None:
    words = ["What?", "http://127.0.0.1:9"] if name == "streaming_client" else ["http://127.0.0.1:9"]
    script = [sys.executable, str(EXAMPLES / f"python/{name}.py"), *words]
    done = subprocess.run(script, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    url = "http://127.0.0.1:9/v1/models"
    assert done.stderr == f"no server answers at {url}; the first lines of this script start one\n"


def test_offline_batch_names_a_missing_file(tmp_path: Path) -> None:
    source = tmp_path / "none.jsonl"
    with pytest.raises(SystemExit) as ended:
        main_of("offline_batch.py")(str(source))
    assert str(ended.value).startswith(f"{source} cannot be read (No such file or directory); ")


def test_demo_refuses_a_port_in_use(address: str) -> None:
    """Another server's answers must not look like the demo's."""
    port = int(address.rpartition(":")[2])
    script = [sys.executable, str(EXAMPLES / "demo.py"), "--once", f"--port={port}"]
    done = subprocess.run(script, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == f"port {port} is in use; choose another one: make demo PORT={port + 1}\n"
    assert done.stdout == ""


def test_the_readmes_benchmark_command_works(address: str, tiny_llama: Path, capsys: Any) -> None:
    """The command in the README, with the server's address and the tokenizer's folder."""
    command = re.search(r"stoker bench (serve .*?)\n```", (EXAMPLES / "README.md").read_text(), re.DOTALL)
    assert command is not None
    words = command[1].replace("\\\n", " ").replace("examples/", f"{EXAMPLES}/").split()
    assert bench([*words, "--base-url", address, "--tokenizer", str(tiny_llama), "--disable-tqdm"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"Successful requests: +24\b", shown)
    sections = re.split(r"\n\n(?:.*: number of .*|Output tokens per second.*)\n", shown)[1:]
    ttft, itl, rates = [[line.split() for line in section.splitlines()] for section in sections]
    assert sum(int(line[-1].replace(",", "")) for line in ttft) == 24
    assert len(itl) > 0
    assert len(rates) == 12


def test_the_readme_lists_each_example() -> None:
    listed = set(re.findall(r"\]\(([^)]+)\)", (EXAMPLES / "README.md").read_text()))
    files = {path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.rglob("*.*") if "__pycache__" not in path.parts}
    assert listed == files - {"README.md"}
