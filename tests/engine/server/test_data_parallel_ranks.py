"""``stoker serve`` with two engines of two ranks each, of which one process after another is killed or stopped.

Only requests of its engine end with an error, which names the cause, and the server's reports are true throughout.
Nothing is faked: real processes, on a tiny model.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from stoker_engine.cli.lines import stream_lines

from ...support.processes import command_line
from .test_rank_deaths import SECONDS, Served, serving

ENGINES, RANKS = 2, 2
CLIENTS, TOKENS = 10, 300
PROMPTS = [[5, 6, 7 + i, *range(3, 3 + 7 * (i % 4))] for i in range(CLIENTS)]
#: Victim, signal, and expected error.
DEATHS = [
    ("rank", signal.SIGKILL, "was killed by signal 9"),
    ("engine", signal.SIGKILL, "was killed by signal 9"),
    ("rank", signal.SIGSTOP, "was stopped"),
    ("engine", signal.SIGSTOP, "was stopped"),
]


@dataclass
class Answer:
    """A client's result: text, and the error that ended it, if any."""

    text: str = ""
    error: str = ""
    ended: bool = False


@dataclass
class Watch:
    """Reports of /health and /metrics, and contradictions in them."""

    wrong: list[str] = field(default_factory=list)
    counted: dict[str, float] = field(default_factory=dict)

    def look(self, url: str) -> None:
        with contextlib.suppress(httpx.TransportError):
            if (health := httpx.get(f"{url}/health", timeout=SECONDS)).status_code != 200:
                self.wrong.append(health.text)
        for name, value in _samples(url).items():
            if "_total" in name or "_bucket" in name or "_count" in name:
                if value < self.counted.get(name, 0):
                    self.wrong.append(f"{name} fell from {self.counted[name]} to {value}")
                self.counted[name] = value


def _samples(url: str) -> dict[str, float]:
    """Return all metrics of the engines, by name and labels."""
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=SECONDS).text)
    samples = [sample for family in families for sample in family.samples if "engine" in sample.labels]
    return {f"{s.name} {json.dumps(s.labels, sort_keys=True)}": s.value for s in samples}


def _each(url: str, metric: str) -> list[float]:
    """Return a metric of each engine."""
    by_engine = {
        int(json.loads(n.split(" ", 1)[1])["engine"]): v for n, v in _samples(url).items() if n.split()[0] == metric
    }
    return [by_engine[engine] for engine in range(ENGINES)]


def _engine(served: Served, engine: int) -> psutil.Process:
    """Return the process of an engine."""
    for process in psutil.Process(served.process.pid).children():
        words = command_line(process)
        if "stoker_engine.processes.main" in words and words[-1] == str(engine):
            return process
    raise AssertionError(f"there is no engine {engine}")


def _rank(served: Served, engine: int, rank: int) -> psutil.Process:
    """Return the process of a rank."""
    for process in _engine(served, engine).children():
        words = command_line(process)
        if "stoker_engine.exec.rank_main" in words:
            index = words.index("stoker_engine.exec.rank_main") + 1
            if words[index] == str(rank):
                return process
    raise AssertionError(f"there is no rank {rank} of engine {engine}")


async def _ask(client: httpx.AsyncClient, prompt: list[int], started: asyncio.Semaphore) -> Answer:
    body = {"prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0, "stream": True}
    answer = Answer()
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in stream_lines(response.aiter_bytes()):
            event = line.removeprefix("data: ")
            if event == "[DONE]":
                answer.ended = True
            elif event:
                content = json.loads(event)
                if "error" in content:
                    answer.error, answer.ended = content["error"]["message"], True
                else:
                    answer.text += content["choices"][0]["text"]
                    started.release()
    return answer


def _ask_all(url: str, victim: psutil.Process | None = None, signum: int = 0) -> list[Answer]:
    """Send all prompts concurrently; signal a process once all of them have output."""

    async def run() -> list[Answer]:
        started = [asyncio.Semaphore(0) for _ in PROMPTS]
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=SECONDS, limits=limits) as client:
            answers = [asyncio.create_task(_ask(client, *each)) for each in zip(PROMPTS, started, strict=True)]
            if victim is not None:
                for each in started:
                    await each.acquire()
                victim.send_signal(signum)
            return await asyncio.gather(*answers)

    return asyncio.run(run())


@contextmanager
def _watched(url: str) -> Iterator[Watch]:
    watch, over = Watch(), threading.Event()

    def look() -> None:
        while not over.wait(0.2):
            watch.look(url)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield watch
    finally:
        over.set()
        thread.join()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(2))
def test_one_engine_serves_while_the_other_dies(seed: int, tiny_llama: Path, tmp_path: Path) -> None:
    chance = random.Random(seed)
    whole = _expected(tiny_llama)
    words = [f"--data-parallel-size={ENGINES}", "--max-engine-restarts=9", "--served-model-name=tiny"]
    words += [f"--step-timeout={SECONDS}"]  # four ranks start concurrently, on a busy machine
    with serving(tiny_llama, tmp_path, *words) as served:
        url = served.url
        with _watched(url) as watch:
            assert [answer.text for answer in _ask_all(url)] == whole
            for death, (process_kind, signum, cause) in enumerate(chance.sample(DEATHS, len(DEATHS))):
                engine, before = death % ENGINES, _each(url, "stoker:engine_restarts_total")
                number = chance.randrange(RANKS)
                victim = _engine(served, engine) if process_kind == "engine" else _rank(served, engine, number)
                answers = _ask_all(url, victim, signum)
                assert all(answer.ended for answer in answers)
                failed = [answer for answer in answers if answer.error]
                assert 0 < len(failed) < CLIENTS, "each engine had some requests"
                for answer, expected in zip(answers, whole, strict=True):
                    if not answer.error:
                        assert answer.text == expected
                        continue
                    assert expected.startswith(answer.text)
                    assert f"engine {engine + 1} of {ENGINES} (engine {engine})" in answer.error
                    assert cause in answer.error
                    assert process_kind == "engine" or f"rank {number} of {RANKS}" in answer.error
                before[engine] += 1
                served.until(lambda: _each(url, "stoker:engine_up") == [1.0] * ENGINES, "all engines serve again")
                assert _each(url, "stoker:engine_restarts_total") == before
                assert _each(url, "vllm:num_requests_running") == [0.0] * ENGINES
                assert [answer.text for answer in _ask_all(url)] == whole
        assert not watch.wrong
        assert "Traceback" not in served.log
        last = threading.Thread(target=lambda: _ask_all(url))
        last.start()
        served.until(lambda: sum(_each(url, "vllm:num_requests_running")) > 0, "requests run")
        served.process.terminate()
        assert served.ended() == 0
        last.join()


def _expected(model: Path) -> list[str]:
    """Return the output of a single process."""
    from stoker_engine import LLM, SamplingParams

    llm = LLM(str(model), num_gpu_blocks_override=256)
    greedy = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    return [output.outputs[0].text for output in llm.generate(PROMPTS, greedy, use_tqdm=False)]
