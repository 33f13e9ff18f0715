"""Servers with several front ends, as processes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from stoker_engine.cli.lines import lines_of

from ....support.processes import command_line
from ....support.waiting import until

_SERVE = "; from stoker_engine.cli.serve import main; sys.exit(main(sys.argv[1:]))"
_CRASHING_ENGINE = Path(__file__).parents[2] / "processes" / "crashing_engine.py"
FRONT_END = "stoker_engine.server.front_ends.main"
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
GREEDY = {"temperature": 0, "ignore_eos": True}


class Running:
    """A running server.

    Attributes:
        log: lines written so far.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.log: list[str] = []
        self.url = ""
        self._client = httpx.Client(headers={"connection": "close"}, timeout=120)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.log.extend(iter(self.process.stderr.readline, ""))

    def has_logged(self, text: str) -> bool:
        return any(text in line for line in self.log)

    def num_logged(self, text: str) -> int:
        return sum(text in line for line in self.log)

    def front_ends(self) -> list[psutil.Process]:
        return [each for each in psutil.Process(self.process.pid).children() if FRONT_END in command_line(each)]

    def engines(self) -> list[psutil.Process]:
        children = psutil.Process(self.process.pid).children()
        return [each for each in children if str(_CRASHING_ENGINE) in command_line(each)]

    def replace(self, front_end: psutil.Process) -> None:
        """Kill a front end, and wait until another one serves."""
        num_replaced = self.num_logged("serves again")
        front_end.kill()
        until(lambda: self.num_logged("serves again") > num_replaced, lambda: "".join(self.log))

    def replace_front_ends(self) -> None:
        """Replace all front ends, one after the other."""
        for front_end in self.front_ends():
            self.replace(front_end)

    def get(self, path: str) -> httpx.Response:
        """Get on a new connection, so that any front end may answer."""
        return self._client.get(f"{self.url}{path}")

    def post(self, path: str = "/v1/completions", **body: Any) -> httpx.Response:
        """Post on a new connection."""
        return self._client.post(f"{self.url}{path}", json=body)

    def text(self, prompt: list[int], max_tokens: int = 24) -> str:
        answer = self.post(prompt=prompt, max_tokens=max_tokens, **GREEDY)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    def stream(self, prompt: list[int], max_tokens: int, **headers: str) -> Iterator[str]:
        """Yield the texts of a stream's events, as they arrive."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "stream": True, **GREEDY}
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, headers=headers, timeout=120) as answer:
            for line in lines_of(answer.iter_bytes()):
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    return
                if data:
                    event = json.loads(data)
                    if "error" in event:
                        raise ConnectionError(event["error"]["message"])
                    yield event["choices"][0]["text"]

    def metric(self, name: str, labels: str = "") -> float:
        """Return the sum of a metric's series whose labels contain `labels`."""
        lines = self.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if re.match(rf"{name}[ {{]", line) and labels in line)

    def num_requests(self) -> float:
        return self.metric("vllm:num_requests_running") + self.metric("vllm:num_requests_waiting")

    def until_idle(self) -> None:
        until(lambda: self.num_requests() == 0, "no request runs")

    def ended(self) -> int:
        return self.process.wait(60)


def crashing_engine(deaths: Path) -> str:
    """Return the setup of a server whose engines are scripted and start fast; see `crashing_engine.py`."""
    deaths.mkdir(exist_ok=True)
    program = ("-P", str(_CRASHING_ENGINE), str(deaths))
    return f"from stoker_engine.server.front_ends import engine_links; engine_links.PROGRAM = {program!r}"


def start(model: Path, *words: str, setup: str = "pass") -> Running:
    """Start a server.

    Args:
        setup: statement that its process runs first.
    """
    argv = [str(model), "--host=127.0.0.1", "--port=0", "--num-gpu-blocks-override=512", *words]
    program = ["-c", f"import sys; {setup}{_SERVE}"]
    return Running(subprocess.Popen([sys.executable, *program, *argv], stderr=subprocess.PIPE, text=True))


@contextmanager
def serving(model: Path, *words: str, setup: str = "pass") -> Iterator[Running]:
    """Start a server and wait until it serves; kill it at the end."""
    running = start(model, *words, setup=setup)
    try:
        until(lambda: running.has_logged("serving ") or running.process.poll() is not None)
        found = re.findall(r" on (https?://[0-9.:]+)", "".join(running.log))
        assert found, "".join(running.log)
        running.url = found[0]
        yield running
    finally:
        running.process.kill()
        running.process.wait()
