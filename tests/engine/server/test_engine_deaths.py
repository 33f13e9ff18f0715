"""Engines that die under many clients, at every point, in every way, once or repeatedly. No client ever hangs.

Faked: the model, in `crashing_engine.py`. Real: the server, its sockets, the engine's process, scheduler and blocks.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from stoker_common.errors import EngineDeadError, EngineOutOfMemoryError
from stoker_engine.async_llm import AsyncLLM
from stoker_engine.cli.lines import stream_lines
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.contract.frontend_args import FrontendArgs
from stoker_engine.contract.serve_args import ServeArgs

from .conftest import Serving, sample, wait_until

ENGINE = Path(__file__).parents[1] / "processes" / "crashing_engine.py"
TOKENS = 60
SECONDS = 120


@dataclass
class CrashingServer:
    """A server whose engine dies as planned: how, by point."""

    serving: Serving
    llm: AsyncLLM
    deaths: Path

    def plan(self, **lines: str) -> None:
        for point, words in lines.items():
            part = self.deaths / f".{point}"
            part.write_text(words.replace(" ", "\n"))
            part.rename(self.deaths / point)

    @property
    def all_died(self) -> bool:
        return not any(self.deaths.iterdir())


@contextmanager
def _crashing_server(model: Path, deaths: Path, restarts: int) -> Iterator[CrashingServer]:
    deaths.mkdir()
    args = EngineArgs(str(model), served_model_name=("tiny",))
    llm = AsyncLLM(args, program=("-P", str(ENGINE), str(deaths)))
    serving = Serving(ServeArgs(args, FrontendArgs(shutdown_grace=0, max_engine_restarts=restarts)), llm)
    with pytest.MonkeyPatch.context() as patch:
        # On a busy machine a restart may take longer than requests wait for it by default.
        patch.setattr("stoker_engine.server.engine.restarts.PATIENCE_S", SECONDS)
        try:
            wait_until(lambda: llm.is_ready)
            yield CrashingServer(serving, llm, deaths)
        finally:
            with suppress(RuntimeError):  # it has ended already
                serving.call(serving.server.stop, 2)
            serving.join()
            llm.shutdown()


@pytest.fixture(scope="module")
def crashing(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CrashingServer]:
    """A server that tests share, since it survives the deaths of its engines."""
    with _crashing_server(tiny_llama, tmp_path_factory.mktemp("crashing") / "deaths", 1000) as crashing:
        yield crashing


@dataclass
class Answer:
    """A client's result. `ended`: whole, by an error event, or by the client itself."""

    status: int
    text: str = ""
    ended: str = ""
    retry_after: str | None = None
    not_begun: bool = False


async def _ask(
    client: httpx.AsyncClient, stream: bool, leaves: bool = False, has_text: asyncio.Event | None = None
) -> Answer:
    body = {"prompt": "a", "max_tokens": TOKENS, "ignore_eos": True, "stream": stream}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        headers = response.headers
        not_begun = "x-stoker-not-begun" in headers
        answer = Answer(response.status_code, retry_after=headers.get("retry-after"), not_begun=not_begun)
        if answer.status != 200 or not stream:
            content = json.loads(await response.aread())
            if answer.status == 200:
                answer.text, answer.ended = content["choices"][0]["text"], "whole"
            return answer
        async for line in stream_lines(response.aiter_bytes()):
            event = line.removeprefix("data: ")
            if event == "[DONE]":
                answer.ended = "whole"
            elif event and "error" in json.loads(event):
                answer.ended = "error"
            elif event:
                answer.text += json.loads(event)["choices"][0]["text"]
                if has_text is not None:
                    has_text.set()
                if leaves:
                    answer.ended = "left"
                    break
    return answer


def _ask_all(crashing: CrashingServer, clients: int, first: int = 0) -> list[Answer]:
    """Run clients: every second one streams, every sixth disconnects once it has text.

    Before them, `first` more stream, and the others wait for their text: an engine that dies later has started a
    response, however slowly the others arrive.
    """

    async def run() -> list[Answer]:
        limits = httpx.Limits(max_connections=None)
        async with (
            asyncio.timeout(SECONDS),
            httpx.AsyncClient(base_url=crashing.serving.url, timeout=None, limits=limits) as c,
        ):
            texts = [asyncio.Event() for _ in range(first)]
            started = [asyncio.create_task(_ask(c, True, has_text=text)) for text in texts]
            for text in texts:
                await text.wait()
            return await asyncio.gather(*started, *(_ask(c, i % 2 == 0, i % 6 == 4) for i in range(clients)))

    return asyncio.run(run())


def _whole(crashing: CrashingServer) -> str:
    (answer,) = _ask_all(crashing, 1)
    assert answer.status == 200 and answer.ended == "whole"
    return answer.text


def _is_balanced(crashing: CrashingServer) -> bool:
    url = crashing.serving.url
    return all(
        sample(url, name) == 0
        for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    )


@pytest.mark.parametrize(
    "plan",
    [
        {"take": "9"},
        {"take": "raise"},
        {"step": "9"},
        {"step": "40"},
        {"step": "11"},
        {"step": "exit"},
        {"step": "raise"},
        {"send": "9"},
        {"send": "unpicklable"},
        {"send": "junk"},
        {"step": "9", "load": "9"},
        {"take": "64", "load": "raise 40 exit"},
        {"step": "9 9 9"},
        {"send": "15", "start": "9 40", "load": "11"},
    ],
    ids=str,
)
def test_requests_without_output_wait_for_the_restarted_engine(crashing: CrashingServer, plan: dict[str, str]) -> None:
    """Each response is complete, and no part of it is repeated."""
    whole = _whole(crashing)
    restarts = sample(crashing.serving.url, "stoker:engine_restarts_total")
    crashing.plan(**plan)
    for answer in _ask_all(crashing, 18):
        assert answer.status == 200
        assert answer.ended in ("whole", "left")
        assert whole.startswith(answer.text)
        assert answer.ended == "left" or answer.text == whole
    assert crashing.all_died
    deaths = sum(len(words.split()) for words in plan.values())
    assert sample(crashing.serving.url, "stoker:engine_restarts_total") == restarts + deaths
    wait_until(lambda: _is_balanced(crashing))


@pytest.mark.parametrize("how", ["9", "40", "11", "raise"])
def test_requests_with_output_fail_and_no_client_hangs(crashing: CrashingServer, how: str) -> None:
    whole = _whole(crashing)
    crashing.plan(token=how)
    answers = _ask_all(crashing, 60, first=1)
    assert crashing.all_died
    assert "error" in {answer.ended for answer in answers}
    for answer in answers:
        assert answer.status in (200, 500)
        assert whole.startswith(answer.text)
        # A client that disconnects may have the whole text: on a busy machine it arrives at once.
        assert answer.ended == "left" or (answer.text == whole) == (answer.ended == "whole")
        assert answer.ended != "error" or answer.text, "an error is an event only after some text"
    assert _whole(crashing) == whole
    wait_until(lambda: _is_balanced(crashing))


def test_a_request_that_kills_its_engine_is_retried_once(crashing: CrashingServer) -> None:
    """A prompt that kills its engine must not use up all restarts."""
    crashing.plan(step="11 raise")
    (answer,) = _ask_all(crashing, 1)
    assert answer.status == 500
    assert crashing.all_died
    assert _whole(crashing)


@pytest.mark.parametrize(
    "restarts, plan",
    [(0, {"step": "9"}), (2, {"step": "9", "load": "9 40"}), (1, {"step": "9 9"}), (5, {"step": "memory"})],
    ids=str,
)
def test_clients_get_503_with_retry_after_if_no_restarts_are_left(
    tiny_llama: Path, tmp_path: Path, restarts: int, plan: dict[str, str]
) -> None:
    """The server ends with the last death. After running out of memory there are no restarts."""
    with _crashing_server(tiny_llama, tmp_path / "deaths", restarts) as crashing:
        crashing.plan(**plan)
        answers = _ask_all(crashing, 12)
        assert not all(answer.not_begun for answer in answers), (
            "a request that killed an engine must not reach another server"
        )
        for answer in answers:
            assert answer.status == 503
            assert answer.retry_after is not None and int(answer.retry_after) > 0
        crashing.serving.join()
        assert crashing.all_died
        failure = crashing.serving.server.failure
        assert isinstance(failure, EngineDeadError)
        assert isinstance(failure, EngineOutOfMemoryError) == (plan == {"step": "memory"})


@pytest.mark.parametrize("point, how", [("step", "19"), ("step", "hang"), ("send", "hang"), ("take", "hang")])
def test_a_stuck_engine_is_killed_and_its_clients_get_503(
    tiny_llama: Path, tmp_path: Path, point: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker_engine.processes.watchdog.STOPPED_TIMEOUT_S", 0.5)
    with _crashing_server(tiny_llama, tmp_path / "deaths", 3) as crashing:
        crashing.llm.engines[0].watchdog.step_timeout = 1.5
        crashing.plan(**{point: how})
        for answer in _ask_all(crashing, 12):
            assert answer.status == 503
        crashing.serving.join()
        assert ("stopped" if how == "19" else "stuck") in str(crashing.serving.server.failure)
        assert ("sending" in str(crashing.serving.server.failure)) == (point == "send")
