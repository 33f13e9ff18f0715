"""Polling of servers: report formats, cost, and servers that do not respond."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from stoker_gateway.errors import GatewayError
from stoker_gateway.polling.poller import (
    AWAITED_PERIOD_S,
    CORE_SHARE,
    LOST_AFTER,
    MAX_AWAITED,
    TIMEOUT_S,
    HttpProbe,
    Poller,
    PollerThread,
    PollResult,
    read_metrics,
)
from stoker_gateway.scheduling.load import ServerLoad

from ...support.virtual_time import elapse

VirtualTime = Callable[[Callable[[], Coroutine[Any, Any, None]]], None]
LABEL = st.text(st.characters(codec="utf-8"), max_size=12)


def metrics_text(engines: Mapping[str, tuple[float, float, float]], model: str = "m") -> bytes:
    """Return metrics as the reference client library writes them."""
    registry = CollectorRegistry()
    gauges = [
        Gauge(
            f"vllm:{name}", "Help, with vllm:num_requests_running 7 in it.", ["engine", "model_name"], registry=registry
        )
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    ]
    reason = Gauge("vllm:num_requests_waiting_by_reason", "Other.", ["reason"], registry=registry)
    reason.labels("capacity").set(1000)
    for engine, values in engines.items():
        for gauge, value in zip(gauges, values, strict=True):
            gauge.labels(engine, model).set(value)
    return generate_latest(registry)


NUMBERS = st.tuples(st.integers(0, 2000), st.integers(0, 10**7), st.floats(0, 1))


@given(st.dictionaries(LABEL, NUMBERS, min_size=1, max_size=4), LABEL)
def test_metrics_of_the_client_library_are_read(engines: dict[str, tuple[int, int, float]], model: str) -> None:
    load = read_metrics(metrics_text(engines, model))
    assert load.running == sum(each[0] for each in engines.values())
    assert load.waiting == sum(each[1] for each in engines.values())
    assert load.kv_usage == pytest.approx(sum(each[2] for each in engines.values()) / len(engines))
    assert load.counted
    assert load.ready


@pytest.mark.parametrize("value", ["NaN", "-1", "+Inf", "", "x", "1_0x"])
@pytest.mark.parametrize("name", ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"])
def test_malformed_metric_values_are_not_counted(name: str, value: str) -> None:
    lines = {"num_requests_running": "1", "num_requests_waiting": "2", "kv_cache_usage_perc": "0.5"}
    lines[name] = value
    text = "".join(f"vllm:{each} {number}\n" for each, number in lines.items())
    assert not read_metrics(text.encode()).counted


@given(st.binary(max_size=300), st.integers(0, 200))
def test_arbitrary_bytes_are_parsed_without_error(junk: bytes, at: int) -> None:
    text = metrics_text({"0": (1, 2, 0.5)})
    for each in (junk, text[:at] + junk + text[at:], text[: len(text) - at]):
        load = read_metrics(each)
        assert load.running >= 0
        assert 0 <= load.kv_usage <= 1


def test_servers_are_polled_once_per_period_which_grows_with_the_cost(virtual_time: VirtualTime) -> None:
    counts, spent = Counter[str](), 0.0

    async def poll(server: str) -> ServerLoad:
        nonlocal spent
        counts[server] += 1
        spent += 0.002
        await elapse(0.05)
        return ServerLoad()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        poller = Poller(poll, lambda results: None, lambda: spent)
        poller.set_servers([f"s{number}" for number in range(1000)])
        task = asyncio.create_task(poller.run())
        await elapse(30)  # the first period uses an estimated cost
        began, spent_before = loop.time(), spent
        assert poller.period_s == pytest.approx(1000 * 0.002 / CORE_SHARE, rel=0.1)
        assert len(counts) == 1000
        await elapse(200)
        assert spent - spent_before <= 0.1 * (loop.time() - began)
        poller.set_servers(["s1", "new"])
        await elapse(30)
        before = Counter(counts)
        await elapse(10.5)
        assert set(counts - before) == {"s1", "new"}
        assert (counts - before)["new"] in (10, 11)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    virtual_time(main)
    assert len(counts) == 1001


def test_silent_server_delays_no_other_and_is_lost_in_the_end(virtual_time: VirtualTime) -> None:
    results: list[PollResult] = []
    back = False

    async def poll(server: str) -> ServerLoad:
        if server == "frozen" and not back:
            await elapse(3)
            raise TimeoutError
        if server == "refuses" and not back:
            raise ConnectionRefusedError
        return ServerLoad(running=1)

    async def main() -> None:
        nonlocal back
        poller = Poller(poll, results.append, lambda: 0.0)
        poller.set_servers(["frozen", "well", "refuses"])
        task = asyncio.create_task(poller.run())
        await elapse(20)
        loads = {name: [each.load for each in results if each.server == name] for name in ("frozen", "well", "refuses")}
        assert len(loads["well"]) >= 19
        for name, after in (("frozen", 2), ("refuses", LOST_AFTER)):
            assert loads[name][: after - 1] == [None] * (after - 1)
            assert all(load is not None and not load.ready for load in loads[name][after - 1 :])
            assert len(loads[name]) > LOST_AFTER
        back = True
        await elapse(5)
        assert [each.load for each in results if each.server == "frozen"][-1] == ServerLoad(running=1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    virtual_time(main)


def test_awaited_servers_are_polled_more_often_within_a_cpu_limit_and_others_as_before(
    virtual_time: VirtualTime,
) -> None:
    counts, spent = Counter[str](), 0.0

    async def poll(server: str) -> ServerLoad:
        nonlocal spent
        counts[server] += 1
        spent += 0.002
        return ServerLoad()

    async def main() -> None:
        poller = Poller(poll, lambda results: None, lambda: spent)
        poller.set_servers([f"s{number}" for number in range(100)])
        task = asyncio.create_task(poller.run())
        await elapse(30)
        period = poller.period_s
        poller.set_awaited(["s1", "gone"])
        counts.clear()
        await elapse(20)
        assert "gone" not in counts
        assert counts["s1"] >= 20 / AWAITED_PERIOD_S > 3 * max(counts[each] for each in counts if each != "s1")
        assert poller.period_s == pytest.approx(period, rel=0.1)
        poller.set_awaited(f"s{number}" for number in range(100))
        counts.clear()
        await elapse(20)
        assert sum(counts[each] >= 2 * 20 / period for each in counts) == MAX_AWAITED
        before, began = spent, asyncio.get_running_loop().time()
        await elapse(100)
        assert spent - before <= 0.2 * (asyncio.get_running_loop().time() - began)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    virtual_time(main)


@asynccontextmanager
async def a_server(answers: dict[str, tuple[int, bytes]]) -> AsyncIterator[str]:
    """Run a server that responds by `answers`, which may change; yield its address."""

    async def answer(request: web.BaseRequest) -> web.Response:
        status, body = answers.get(request.path, (404, b""))
        return web.Response(status=status, body=body, headers={"location": "/metrics"} if status == 302 else {})

    runner = web.ServerRunner(web.Server(answer))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


WELL = metrics_text({"0": (3, 1, 0.25)})
LOADED = ServerLoad(3, 1, 0.25)
UNREADY = ServerLoad(ready=False, counted=False)
UNCOUNTED = ServerLoad(counted=False)


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ({"/ready": (200, b""), "/metrics": (200, WELL)}, LOADED),
        ({"/ready": (503, b""), "/health": (200, b""), "/metrics": (200, WELL)}, UNREADY),
        ({"/health": (200, b""), "/metrics": (200, WELL)}, LOADED),
        ({"/health": (503, b""), "/metrics": (200, WELL)}, UNREADY),
        ({"/metrics": (200, WELL)}, LOADED),
        ({}, UNCOUNTED),
        ({"/ready": (200, b""), "/metrics": (500, WELL)}, UNCOUNTED),
        ({"/ready": (200, b""), "/metrics": (302, WELL)}, UNCOUNTED),
        ({"/ready": (200, b""), "/metrics": (200, WELL + b"#" * (5 << 20))}, UNCOUNTED),
    ],
    ids=[
        "stoker",
        "stoker that drains",
        "vllm",
        "vllm that starts",
        "metrics alone",
        "no endpoint",
        "metrics fail",
        "redirect",
        "too large",
    ],
)
def test_probe_reads_each_servers_state(answers: dict[str, tuple[int, bytes]], says: ServerLoad) -> None:
    async def main() -> None:
        async with a_server(answers) as server, HttpProbe() as probe:
            for _ in range(2):
                assert await probe(server) == says
            answers.clear()
            answers.update({"/ready": (200, b""), "/metrics": (200, WELL)})
            if says != LOADED:
                await probe(server)
            assert (await probe(server)).ready

    asyncio.run(main())


@pytest.mark.parametrize("first", [0, 1])
def test_models_are_requested_again_soon_if_every_credential_is_refused(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker_gateway.polling.poller.MODELS_S", math.inf)

    async def main() -> None:
        answers = {"/ready": (200, b""), "/metrics": (200, WELL), "/v1/models": (401, b"")}
        async with a_server(answers) as server, HttpProbe(on_models=lambda *_: None) as probe:
            probe.set_authorizations({server: ("Bearer a", "Bearer b")})
            probe._first[server] = first  # as after a time-out of the candidates before it
            await probe(server)
            due, _ = probe._models_at[server]
            assert math.isfinite(due)

    asyncio.run(main())


def test_poller_thread_reports_to_the_starting_loop_and_stops() -> None:
    async def main() -> None:
        results: asyncio.Queue[PollResult] = asyncio.Queue()
        async with a_server({"/ready": (200, b""), "/metrics": (200, WELL)}) as server:
            thread = PollerThread(results.put_nowait)
            thread.poller.set_servers([server])
            thread.start()
            first = await results.get()
            assert (first.server, first.load) == (server, LOADED)
            assert first.sent_at <= asyncio.get_running_loop().time()
            await thread.stop()

    asyncio.run(main())


def test_a_failure_of_the_polling_thread_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(_: Poller) -> None:
        raise ValueError("its own mistake")

    async def main() -> None:
        thread = PollerThread(lambda _: None)
        thread.start()
        with pytest.raises(GatewayError, match=r"polling the servers failed.*its own mistake"):
            await thread.watch()
        await thread.stop()

    monkeypatch.setattr(Poller, "run", fail)
    asyncio.run(main())


@pytest.mark.parametrize("frozen_at", [10.0, 10.01, 10.5, 10.99])
@pytest.mark.parametrize("takes_s", [0.0, 0.4])
def test_a_frozen_server_is_lost_five_seconds_after_its_last_answer(
    frozen_at: float, takes_s: float, virtual_time: VirtualTime
) -> None:
    results: list[tuple[float, PollResult]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()

        async def poll(server: str) -> ServerLoad:
            await elapse(takes_s)
            if server == "frozen" and frozen_at <= loop.time() < 30:
                await elapse(TIMEOUT_S - takes_s)
                raise TimeoutError
            return ServerLoad()

        poller = Poller(poll, lambda result: results.append((loop.time(), result)), lambda: 0.0)
        poller.set_servers(("other", "frozen"))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(40):
                await poller.run()

    virtual_time(main)
    states = [
        (time, result.load.ready) for time, result in results if result.server == "frozen" and result.load is not None
    ]
    lost = min(time for time, ready in states if not ready)
    answered = max(time for time, ready in states if ready and time < lost)
    assert answered < lost <= answered + 5.01
    assert not [ready for time, ready in states if ready and lost < time < 30]
    assert [time for time, ready in states if ready and time > 30]
    sent = [result.sent_at for _, result in results if result.server == "frozen" and result.load is not None]
    assert sent == sorted(sent)  # older ones would be ignored
    assert all(result.load == ServerLoad() for _, result in results if result.server == "other")
