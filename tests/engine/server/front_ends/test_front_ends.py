"""A server with several front ends: one port, one engine, one set of metrics, whichever process answers."""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from stoker_engine.cli.lines import lines_of

from ....support.processes import command_line, lives
from ....support.waiting import until
from ...conftest import engine_of
from .running import CHAT_TEMPLATE, GREEDY, Running, serving


@pytest.fixture(scope="module")
def three(tiny_llama: Path) -> Iterator[Running]:
    """A server with three front ends."""
    with serving(
        tiny_llama,
        "--api-server-count=3",
        "--max-engine-restarts=9",
        "--max-num-queued-reqs=60",
        "--max-num-seqs=8",
        f"--chat-template={CHAT_TEMPLATE}",
        "--served-model-name=m",
    ) as running:
        yield running
        assert "Traceback" not in "".join(running.log)


def _prompt(number: int) -> list[int]:
    return [5, 6, 7 + number, *range(3, 3 + 5 * (number % 4))]


def test_streams_of_many_clients_are_right_and_spread_over_the_front_ends(three: Running) -> None:
    """Clients choose the same request id, on connections to different processes."""
    expected = [three.text(_prompt(number)) for number in range(6)]
    before = three.metric("http_requests_total", 'handler="/v1/completions"')

    def streamed(number: int) -> str:
        return "".join(three.stream(_prompt(number % 6), 24, **{"x-request-id": "same"}))

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(streamed, range(48))) == [expected[number % 6] for number in range(48)]
    three.until_idle()
    until(lambda: three.metric("http_requests_total", 'handler="/v1/completions"') == before + 48)
    pattern = re.compile(r"POST /v1/completions.*\[front_end=(\d)")
    until(lambda: sum(map(bool, map(pattern.search, three.log))) >= 54)
    served = Counter(found[1] for line in three.log if (found := pattern.search(line)))
    assert len(served) == 3, "each front end answered requests"


def test_metrics_are_those_of_the_server_whichever_process_answers(three: Running) -> None:
    names = ("vllm:request_success_total", "vllm:generation_tokens_total", "http_request_duration_seconds_count")
    before = [three.metric(name) for name in names]
    for number in range(9):
        three.text(_prompt(number), max_tokens=4)
    three.until_idle()
    until(lambda: [three.metric(name) for name in names] == [before[0] + 9, before[1] + 36, before[2] + 9])
    scrapes = {
        re.sub(r"^(process|python)_.*\n", "", httpx.get(f"{three.url}/metrics").text, flags=re.MULTILINE)
        for _ in range(9)
    }
    assert len(scrapes) == 1
    families = re.findall(r"^# TYPE (\S+)", scrapes.pop(), re.MULTILINE)
    assert len(families) == len(set(families)), "no metric is reported twice"


def test_queue_limits_count_the_requests_of_all_front_ends(three: Running) -> None:
    rejected = three.metric("vllm:admission_rejections_total")
    body = {"prompt": [5], "n": 50, "max_tokens": 480, "stream": True, **GREEDY}
    with httpx.stream("POST", f"{three.url}/v1/completions", json=body, timeout=120) as answer:
        lines = lines_of(answer.iter_bytes())  # keeps the connection open
        next(lines)
        codes = {three.post(prompt=[5], n=11, max_tokens=1).status_code for _ in range(9)}
        assert codes == {429}
        assert three.post(prompt=[5], n=10, max_tokens=1).status_code == 200
        assert httpx.get(f"{three.url}/load").json() == {"server_load": 1}
    three.until_idle()
    until(lambda: httpx.get(f"{three.url}/load").json() == {"server_load": 0})
    assert three.metric("vllm:admission_rejections_total") == rejected + 9


def test_a_client_that_disconnects_aborts_its_request(three: Running) -> None:
    three.until_idle()
    aborted = three.metric("vllm:request_success_total", 'finished_reason="abort"')
    streams = [three.stream(_prompt(number), 450) for number in range(4)]
    for stream in streams:
        next(stream)
        stream.close()  # type: ignore[attr-defined]
    three.until_idle()
    until(lambda: three.metric("vllm:request_success_total", 'finished_reason="abort"') == aborted + 4)


def test_any_front_end_returns_and_continues_stored_responses(three: Running) -> None:
    created = three.post("/v1/responses", input="hello", max_output_tokens=4, model="m").json()
    path = f"{three.url}/v1/responses/{created['id']}"
    for _ in range(6):
        assert httpx.get(path).json()["id"] == created["id"]
        assert len(httpx.get(f"{path}/input_items").json()["data"]) == 1
    for _ in range(6):
        following = three.post(
            "/v1/responses", input="on", max_output_tokens=1, model="m", previous_response_id=created["id"]
        )
        assert following.status_code == 200, following.text
    assert httpx.delete(path).status_code == 200
    assert {httpx.get(path).status_code for _ in range(6)} == {404}


def test_grammars_work_at_every_front_end(three: Running) -> None:
    for _ in range(6):
        answer = three.post(prompt=[5, 6], max_tokens=8, structured_outputs={"choice": ["yes", "no"]})
        assert answer.json()["choices"][0]["text"] in ("yes", "no"), answer.text


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_a_front_end_that_dies_or_stops_is_replaced_while_other_streams_go_on(
    three: Running, signum: signal.Signals
) -> None:
    three.until_idle()
    expected = three.text(_prompt(1), max_tokens=400)
    before = three.metric("http_requests_total")
    results = list[str]()

    def streamed(_: int) -> None:
        try:
            results.append("".join(three.stream(_prompt(1), 400)))
        except (httpx.HTTPError, ConnectionError):
            results.append("lost")

    front_ends = three.front_ends()
    dependent = front_ends[1].children(recursive=True)
    assert dependent, "it has a tokenizer"
    with ThreadPoolExecutor(12) as pool:
        streams = [pool.submit(streamed, number) for number in range(12)]
        until(lambda: three.num_requests() >= 6)
        # The engine must not wait for a process that does not read; its requests are aborted once it is killed.
        front_ends[1].send_signal(signum)
        for stream in streams:
            stream.result(120)
    assert expected in results
    assert set(results) <= {expected, "lost"}, "streams of other front ends are complete"
    three.until_idle()
    until(lambda: len(three.front_ends()) == 3 and not any(map(lives, [front_ends[1], *dependent])))
    assert front_ends[1] not in three.front_ends()
    assert three.metric("http_requests_total") >= before, "counters do not fall"
    assert {three.text(_prompt(1)) for _ in range(6)} == {expected[: len(three.text(_prompt(1)))]}
    assert httpx.get(f"{three.url}/load").json() == {"server_load": 0}


def test_a_dead_engine_is_restarted_once_while_requests_wait(three: Running) -> None:
    three.until_idle()
    expected = three.text(_prompt(2))
    restarts = three.metric("stoker:engine_restarts_total")
    complete = three.text(_prompt(1), max_tokens=480)
    with ThreadPoolExecutor(12) as pool:
        streams = [pool.submit(lambda: "".join(three.stream(_prompt(1), 480))) for _ in range(6)]
        until(lambda: three.num_requests() >= 3)
        engine = engine_of(three.process.pid)
        engine.kill()
        until(lambda: three.get("/ready").status_code == 503)
        errors = [stream.exception(120) for stream in streams]
        assert any(errors)
        assert {stream.result() for stream, error in zip(streams, errors, strict=True) if error is None} <= {complete}
        until(lambda: three.get("/live").status_code == 200)  # not before the supervisor has started another process
        assert set(pool.map(lambda _: three.text(_prompt(2)), range(6))) == {expected}
    assert {httpx.get(f"{three.url}/ready").status_code for _ in range(6)} == {200}
    answer = three.post(prompt=[5, 6], max_tokens=8, structured_outputs={"choice": ["yes", "no"]})
    assert answer.json()["choices"][0]["text"] in ("yes", "no"), "the new process has the vocabulary"
    assert three.metric("stoker:engine_restarts_total") == restarts + 1
    assert engine_of(three.process.pid).pid != engine.pid
    assert len(three.front_ends()) == 3


def test_sigterm_lets_the_streams_of_all_front_ends_finish(three: Running) -> None:
    """Runs last, since it ends the server."""
    children = psutil.Process(three.process.pid).children(recursive=True)
    expected = three.text(_prompt(3), max_tokens=400)
    streams = [three.stream(_prompt(3), 400) for _ in range(9)]
    started = [next(stream) for stream in streams]
    three.process.terminate()
    with ThreadPoolExecutor(9) as pool:
        rest = list(pool.map("".join, streams))
    assert {first + later for first, later in zip(started, rest, strict=True)} == {expected}
    assert three.ended() == 0, "".join(three.log)
    until(lambda: not any(map(lives, children)), "no process is left")


def test_front_ends_share_several_engines(tiny_llama: Path) -> None:
    """All front ends use both engines, also after one of them was restarted."""
    words = ("--api-server-count=2", "--data-parallel-size=2", "--max-engine-restarts=0")
    with serving(tiny_llama, *words) as running:
        expected = [running.text(_prompt(number)) for number in range(4)]
        with ThreadPoolExecutor(12) as pool:
            texts = list(pool.map(lambda number: running.text(_prompt(number % 4)), range(36)))
        assert texts == [expected[number % 4] for number in range(36)]
        for engine in ("0", "1"):
            assert running.metric("vllm:request_success_total", f'engine="{engine}"') > 0
        children = psutil.Process(running.process.pid).children()
        engines = [each for each in children if "stoker_engine.processes.main" in command_line(each)]
        engines[1].kill()
        until(lambda: running.metric("stoker:engine_up") == 1)
        assert [running.text(_prompt(number)) for number in range(4)] == expected
        until(lambda: running.metric("stoker:engine_up") == 2, "the engine is restarted while the other serves")
        assert [running.text(_prompt(number)) for number in range(4)] == expected
