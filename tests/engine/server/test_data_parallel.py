"""Data-parallel engines behind one server: each dies and restarts without affecting the others.

Faked: the model, in `crashing_engine.py`. Real: the server, its sockets, the engines' processes, schedulers and blocks.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from stoker_common.errors import EngineDeadError, EngineOutOfMemoryError
from stoker_engine.async_llm import AsyncLLM
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.contract.frontend_args import FrontendArgs
from stoker_engine.contract.serve_args import ServeArgs
from stoker_engine.server.engine.restarts import BESIDE_OTHERS

from .conftest import CHAT_TEMPLATE, Serving, sample, wait_until
from .test_engine_deaths import ENGINE, Answer, CrashingServer, _ask_all, _whole

ENGINES = 3


@contextmanager
def _engines(model: Path, deaths: Path, restarts: int = 0, engines: int = 2) -> Iterator[CrashingServer]:
    deaths.mkdir()
    args = EngineArgs(str(model), served_model_name=("tiny",), data_parallel_size=engines)
    llm = AsyncLLM(args, chat_template=CHAT_TEMPLATE, program=("-P", str(ENGINE), str(deaths)))
    serving = Serving(ServeArgs(args, FrontendArgs(shutdown_grace=0, max_engine_restarts=restarts)), llm)
    try:
        wait_until(lambda: llm.is_ready)
        yield CrashingServer(serving, llm, deaths)
    finally:
        with suppress(RuntimeError):  # it has ended already
            serving.call(serving.server.stop, 2)
        serving.join()
        llm.shutdown()
        assert not any(_lives(engine.process.pid) for engine in llm.engines)


@pytest.fixture(scope="module")
def crashing(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CrashingServer]:
    """A server that tests share, since it survives the deaths of its engines."""
    with _engines(tiny_llama, tmp_path_factory.mktemp("engines") / "deaths", 1000, ENGINES) as crashing:
        yield crashing


def _lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _counted(crashing: CrashingServer, name: str) -> list[float]:
    """Return a metric of each engine."""
    return [sample(crashing.serving.url, name, engine=str(engine)) for engine in range(len(crashing.llm.engines))]


def _all_serve(crashing: CrashingServer) -> bool:
    return _counted(crashing, "stoker:engine_up") == [1.0] * len(crashing.llm.engines)


def _is_balanced(crashing: CrashingServer) -> bool:
    """Return whether no engine has requests, by its own and the router's count."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    router = crashing.llm._router
    assert router is not None
    idle = all(not any(_counted(crashing, name)) for name in names)
    return idle and all(router.load(engine) == (0, 0) for engine in range(len(crashing.llm.engines)))


def test_requests_are_spread_and_counted_by_engine(crashing: CrashingServer) -> None:
    whole = _whole(crashing)
    before = _counted(crashing, "vllm:generation_tokens_total")
    assert all(answer.text == whole for answer in _ask_all(crashing, 24) if answer.ended == "whole")
    wait_until(lambda: _is_balanced(crashing))
    after = _counted(crashing, "vllm:generation_tokens_total")
    assert all(new > old for new, old in zip(after, before, strict=True))


def test_every_api_is_served_by_all_engines(crashing: CrashingServer) -> None:
    """Responses do not depend on the engine; the server stores them, so any engine can continue them."""
    wait_until(lambda: _all_serve(crashing))
    messages = [{"role": "user", "content": "a"}]
    bodies = {
        "/v1/completions": {"prompt": ["a", "b", "a"], "n": 2, "max_tokens": 4, "ignore_eos": True},
        "/v1/chat/completions": {"messages": messages, "n": 2, "max_tokens": 4, "ignore_eos": True},
        "/v1/messages": {"model": "tiny", "messages": messages, "max_tokens": 4},
        "/v1/responses": {"input": "a", "max_output_tokens": 16, "temperature": 0},
        "/v1/messages/count_tokens": {"model": "tiny", "messages": messages},
        "/tokenize": {"prompt": "a"},
    }
    varying = {"id", "created", "created_at", "completed_at", "usage", "output"}
    with httpx.Client(base_url=crashing.serving.url, timeout=60) as client:
        before = _counted(crashing, "vllm:generation_tokens_total")
        for path, body in bodies.items():
            answers = [client.post(path, json=body) for _ in range(2 * ENGINES)]
            assert {answer.status_code for answer in answers} == {200}, (path, answers[0].text)
            first, *other_answers = ({k: v for k, v in answer.json().items() if k not in varying} for answer in answers)
            assert all(other == first for other in other_answers), path
        after = _counted(crashing, "vllm:generation_tokens_total")
        assert all(new > old for new, old in zip(after, before, strict=True))
        stored = client.post("/v1/responses", json=bodies["/v1/responses"]).json()["id"]
        for engine in crashing.llm.engines[1:]:
            os.kill(engine.process.pid, signal.SIGKILL)
        assert client.get(f"/v1/responses/{stored}").json()["id"] == stored
        following = {**bodies["/v1/responses"], "previous_response_id": stored}
        assert client.post("/v1/responses", json=following).status_code == 200
    wait_until(lambda: _all_serve(crashing) and _is_balanced(crashing))


@pytest.mark.parametrize("engine, how", [(0, "9"), (1, "raise"), (2, "memory"), (0, "19")])
def test_a_dead_engine_fails_only_its_own_requests(crashing: CrashingServer, engine: int, how: str) -> None:
    """The cause of death does not matter while others serve. The engine is restarted meanwhile."""
    wait_until(lambda: _all_serve(crashing))
    whole, restarts = _whole(crashing), _counted(crashing, "stoker:engine_restarts_total")
    crashing.plan(**{f"token-{engine}": how})
    answers = _ask_all(crashing, 36, first=ENGINES)
    assert crashing.all_died
    _are_whole_or_failed(answers, whole)
    assert sum(answer.ended in ("whole", "left") for answer in answers) >= 12, "the other engines had most requests"
    assert any(answer.ended == "error" or answer.status == 500 for answer in answers)
    wait_until(lambda: _all_serve(crashing) and _is_balanced(crashing))
    restarts[engine] += 1
    assert _counted(crashing, "stoker:engine_restarts_total") == restarts


@pytest.mark.parametrize(
    "plan", [{"step-0": "9"}, {"take-1": "raise"}, {"step-2": "memory"}, {"send-0": "9", "load-0": "9 raise"}], ids=str
)
def test_requests_without_output_move_to_another_engine(crashing: CrashingServer, plan: dict[str, str]) -> None:
    wait_until(lambda: _all_serve(crashing))
    whole = _whole(crashing)
    crashing.plan(**plan)
    for answer in _ask_all(crashing, 18):
        assert answer.status == 200
        assert answer.ended == "left" or answer.text == whole
    wait_until(lambda: crashing.all_died and _all_serve(crashing) and _is_balanced(crashing))


def test_each_prompt_of_a_request_is_answered_once_after_a_death(crashing: CrashingServer) -> None:
    """One of the engines that have prompts dies; the request may also fail as a whole."""
    wait_until(lambda: _all_serve(crashing))
    whole = _whole(crashing)
    crashing.plan(**{"step-1": "9"})
    body = {"prompt": ["a"] * 12, "max_tokens": 60, "ignore_eos": True}
    answer = httpx.post(f"{crashing.serving.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code in (200, 500)
    if answer.status_code == 200:
        assert [choice["text"] for choice in answer.json()["choices"]] == [whole] * 12
    assert crashing.all_died
    wait_until(lambda: _all_serve(crashing) and _is_balanced(crashing))


def test_health_reports_each_engine(tiny_llama: Path, tmp_path: Path) -> None:
    """A dead engine is named; when the last one is dead, the server ends."""
    with _engines(tiny_llama, tmp_path / "deaths") as crashing:
        url = crashing.serving.url
        for death in range(BESIDE_OTHERS + 1):
            wait_until(lambda: _all_serve(crashing))
            os.kill(crashing.llm.engines[1].process.pid, signal.SIGKILL)
            assert httpx.get(f"{url}/ready").status_code == 200
            if death < BESIDE_OTHERS:
                wait_until(lambda n=death: sample(url, "stoker:engine_restarts_total", engine="1") == n + 1)
        wait_until(lambda: crashing.serving.service.restarts[1].given_up)
        assert _counted(crashing, "stoker:engine_up") == [1.0, 0.0]
        health = httpx.get(f"{url}/health")
        assert health.status_code == 200
        assert "engine 0 (of 2): serving" in health.text
        assert "engine 1 (of 2): the engine is dead: the engine process was killed by signal 9" in health.text
        assert _whole(crashing)
        os.kill(crashing.llm.engines[0].process.pid, signal.SIGKILL)
        crashing.serving.join()
        assert isinstance(crashing.serving.server.failure, EngineDeadError)


def test_requests_wait_if_the_last_engine_dies_while_another_restarts(tiny_llama: Path, tmp_path: Path) -> None:
    """No restart is left for the last serving engine, but another one will serve soon."""
    with _engines(tiny_llama, tmp_path / "deaths") as crashing:
        whole, restarts = _whole(crashing), crashing.serving.service.restarts
        os.kill(crashing.llm.engines[1].process.pid, signal.SIGKILL)
        wait_until(restarts[1]._under_way.is_set)
        os.kill(crashing.llm.engines[0].process.pid, signal.SIGKILL)
        wait_until(lambda: crashing.llm.engines[0].is_dead)
        assert _whole(crashing) == whole, "requests wait meanwhile"
        wait_until(lambda: _all_serve(crashing))
        assert _counted(crashing, "stoker:engine_restarts_total") == [1.0, 1.0]
        assert not any(each.given_up for each in restarts)


def test_an_engine_stopped_while_idle_is_restarted(crashing: CrashingServer) -> None:
    """The next request triggers the restart; other engines serve it."""
    wait_until(lambda: _all_serve(crashing))
    whole, restarts = _whole(crashing), _counted(crashing, "stoker:engine_restarts_total")
    os.kill(crashing.llm.engines[1].process.pid, signal.SIGSTOP)
    wait_until(lambda: _counted(crashing, "stoker:engine_up") == [1.0, 0.0, 1.0])
    assert {answer.text for answer in _ask_all(crashing, 3)} == {whole}
    wait_until(lambda: _all_serve(crashing))
    restarts[1] += 1
    assert _counted(crashing, "stoker:engine_restarts_total") == restarts


def test_out_of_memory_of_the_last_serving_engine_ends_the_server(tiny_llama: Path, tmp_path: Path) -> None:
    with _engines(tiny_llama, tmp_path / "deaths", restarts=5) as crashing:
        crashing.plan(**{"load-0": "hang", "step-1": "memory"})
        os.kill(crashing.llm.engines[0].process.pid, signal.SIGKILL)
        again = "engine 0 (of 2): loading again after: the engine process was killed by signal 9 (SIGKILL)"
        wait_until(lambda: again in httpx.get(f"{crashing.serving.url}/health").text)
        statuses = {answer.status for answer in _ask_all(crashing, 6)}
        assert statuses == {503}
        crashing.serving.join()
        assert isinstance(crashing.serving.server.failure, EngineOutOfMemoryError)


def test_a_failed_restart_is_retried_while_others_serve(crashing: CrashingServer) -> None:
    """Arguments that were valid once are retried while others serve: a missing file may return."""
    wait_until(lambda: _all_serve(crashing))
    whole, restarts = _whole(crashing), _counted(crashing, "stoker:engine_restarts_total")
    crashing.plan(**{"load-1": "argument"})
    os.kill(crashing.llm.engines[1].process.pid, signal.SIGKILL)
    wait_until(lambda: crashing.all_died)
    assert _whole(crashing) == whole
    wait_until(lambda: _all_serve(crashing))
    restarts[1] += 2
    assert _counted(crashing, "stoker:engine_restarts_total") == restarts
    assert _whole(crashing) == whole


def test_all_engines_are_restarted_if_they_die_at_once(crashing: CrashingServer) -> None:
    wait_until(lambda: _all_serve(crashing))
    whole = _whole(crashing)

    async def run() -> list[Any]:
        answers = asyncio.create_task(asyncio.to_thread(_ask_all, crashing, 18))
        await asyncio.sleep(0.05)  # sleeps: moment of the deaths, when some requests are in flight
        for engine in crashing.llm.engines:
            os.kill(engine.process.pid, signal.SIGKILL)
        return await answers

    _are_whole_or_failed(asyncio.run(run()), whole)
    wait_until(lambda: _all_serve(crashing) and _is_balanced(crashing))
    assert _whole(crashing) == whole


def _are_whole_or_failed(answers: list[Answer], whole: str) -> None:
    for answer in answers:
        assert answer.status in (200, 500)
        assert whole.startswith(answer.text)
        assert (answer.text == whole) == (answer.ended == "whole") or answer.ended == "left"
