"""Lifecycle: loading, shutdown, death. The engine is faked, sockets are real."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import uvicorn

from stoker_common.errors import EngineDeadError, ModelError
from stoker_engine.server.http.http_server import Server

from ...support.virtual_time import elapse, now
from .conftest import FakeEngine, MakeService, wait_until
from .conftest import serving_fake as serving


def _post(url: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json={"prompt": "a", **fields}, timeout=60)


class PendingRequest:
    """A request in flight, in a thread."""

    def __init__(self, url: str, **fields: Any) -> None:
        self.response: httpx.Response | None = None
        self._thread = threading.Thread(target=self._ask, args=(url, fields))
        self._thread.start()

    def _ask(self, url: str, fields: dict[str, Any]) -> None:
        self.response = _post(url, **fields)

    def answer(self) -> httpx.Response:
        self._thread.join(60)
        assert self.response is not None, "the request got no response"
        return self.response


def test_the_server_listens_while_the_model_loads(engine: FakeEngine) -> None:
    engine.loaded.clear()
    engine.is_ready, engine.status = False, "loading: reading weights"
    with serving(engine) as server:
        assert httpx.get(f"{server.url}/live").status_code == 200
        assert httpx.get(f"{server.url}/health").json()["error"]["message"] == "loading: reading weights"
        assert "process_cpu_seconds_total" in httpx.get(f"{server.url}/metrics").text
        assert _post(server.url).status_code == 503
        engine.is_ready = True
        server.call(engine.loaded.set)
        wait_until(lambda: "vllm:num_requests_running" in httpx.get(f"{server.url}/metrics").text)
        assert _post(server.url).status_code == 200
    assert server.server.failure is None


def test_a_failed_load_ends_the_server(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    async def load() -> None:
        raise ModelError("no such model")

    monkeypatch.setattr(engine, "load", load)
    with serving(engine) as server:
        server.join()
    assert isinstance(server.server.failure, ModelError)


def test_sigterm_while_loading_ends_the_server_at_once(engine: FakeEngine) -> None:
    engine.loaded.clear()
    engine.is_ready = False
    with serving(engine, shutdown_grace=30) as server:
        server.call(server.server.stop, signal.SIGTERM)
        server.join(60)
    assert server.server.failure is None


def test_requests_are_served_in_the_grace_period_and_refused_afterwards(engine: FakeEngine) -> None:
    """Requests in flight before, during and after the grace period."""
    engine.hangs_at = 3
    with (
        serving(engine, shutdown_grace=5, shutdown_timeout=60) as server,
        httpx.Client(base_url=server.url, timeout=60) as kept,
    ):
        before = PendingRequest(server.url)
        wait_until(lambda: len(engine.alive) == 1)
        assert kept.get("/ready").status_code == 200
        engine.hangs_at = None
        server.call(server.server.stop, signal.SIGTERM)
        in_grace = kept.post("/v1/completions", json={"prompt": "a"})  # first, because it restarts the grace period
        assert in_grace.status_code == 200
        assert in_grace.headers["connection"] == "close"
        assert kept.get("/ready").status_code == 503
        assert kept.get("/health").status_code == 200
        assert not server.service.lifecycle.closed, "the grace period has ended too early"
        wait_until(lambda: server.service.lifecycle.closed)
        after = _post(server.url)
        assert after.status_code == 503
        assert int(after.headers["retry-after"]) > 0
        assert after.headers["x-stoker-not-begun"] == "1"
        assert after.headers["connection"] == "close"
        large = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 6000000\r\n\r\n" + b"x" * 6_000_000
        assert _talk(server.url, large).startswith(b"HTTP/1.1 503"), (
            "a client that sends a large body gets the response"
        )
        assert httpx.get(f"{server.url}/live").status_code == 200
        assert server.service.lifecycle.in_flight == 1, "the request in flight still runs"
        (running,) = server.service.running
        server.call(running.fail, ModelError("ended by this test"))
        assert before.answer().status_code == 500
        server.join()
    assert server.server.failure is None


def test_each_request_restarts_the_grace_period_up_to_a_limit(make_service: MakeService, virtual_time: Any) -> None:
    """A client that still sends requests has not noticed that the server is leaving."""

    async def main() -> None:
        service = make_service(shutdown_grace=3, shutdown_timeout=12)
        server, lifecycle = Server(uvicorn.Config(lambda: None), service, ""), service.lifecycle
        engine = asyncio.create_task(asyncio.Event().wait())
        lifecycle.enter()  # a request that hangs
        leaving = asyncio.create_task(server._leave(engine))  # type: ignore[arg-type]
        while not lifecycle.closed:
            await elapse(0.5)
            lifecycle.enter()
            lifecycle.leave()
        assert 3 + 12 / 2 <= now() <= 3 + 12 / 2 + 0.5
        await leaving
        assert now() == 3 + 12, "requests in flight got the whole timeout"
        assert lifecycle.in_flight == 1
        engine.cancel()

    virtual_time(main)


def test_connections_close_after_streams_that_end_during_shutdown(engine: FakeEngine) -> None:
    """Its headers promised keep-alive, but the next request would meet a closed server."""
    engine.hangs_at = 3
    with serving(engine, shutdown_grace=0, shutdown_timeout=300) as server:
        server.call(server.service.lifecycle.enter)  # another request, which keeps the server running
        body = b'{"prompt": "a", "stream": true}'
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        head += "Content-Type: application/json"
        with ThreadPoolExecutor() as pool:
            streamed = pool.submit(_talk, server.url, head.encode() + b"\r\n\r\n" + body)  # reads until the end
            wait_until(lambda: len(engine.alive) == 1)
            server.call(server.server.stop, signal.SIGTERM)
            wait_until(lambda: server.service.lifecycle.closed)
            server.call(engine.released.set)
            assert b"data: [DONE]" in streamed.result(60)
        server.call(server.service.lifecycle.leave)
        server.join(60)
    assert server.server.failure is None


@pytest.mark.parametrize("stream", [False, True])
def test_requests_beyond_the_shutdown_timeout_get_503(engine: FakeEngine, stream: bool) -> None:
    engine.hangs_at = 3
    with serving(engine, shutdown_grace=0, shutdown_timeout=0.2) as server:
        pending = PendingRequest(server.url, stream=stream)
        wait_until(lambda: len(engine.alive) == 1)
        server.call(server.server.stop, signal.SIGTERM)
        answer = pending.answer()
        server.join(60)
    body = answer.text.split("\n\n")[-2].removeprefix("data: ") if stream else answer.text
    assert json.loads(body)["error"]["type"] == "service_unavailable_error"
    assert answer.status_code == (200 if stream else 503)
    assert "x-stoker-not-begun" not in answer.headers
    assert server.server.failure is None
    assert not engine.alive


def test_an_idle_server_ends_after_the_grace_period(engine: FakeEngine) -> None:
    with serving(engine, shutdown_grace=0.5, shutdown_timeout=30) as server:
        wait_until(lambda: httpx.get(f"{server.url}/ready").status_code == 200)
        began = time.monotonic()
        server.call(server.server.stop, signal.SIGTERM)
        server.join(60)
        assert time.monotonic() - began >= 0.5


def test_a_second_signal_ends_the_server_at_once(engine: FakeEngine) -> None:
    engine.hangs_at = 0
    with serving(engine, shutdown_grace=30, shutdown_timeout=30) as server:
        pending = PendingRequest(server.url)
        wait_until(lambda: len(engine.alive) == 1)
        for _ in range(2):
            server.call(server.server.stop, signal.SIGTERM)
        assert pending.answer().status_code == 503
        server.join(60)


def test_a_dead_engine_ends_the_server(engine: FakeEngine) -> None:
    with serving(engine) as server:
        assert _post(server.url).status_code == 200
        server.call(engine.death.set)
        server.join(60)
    assert isinstance(server.server.failure, EngineDeadError)
    assert "a test killed it" in str(server.server.failure)


def test_an_idle_server_has_no_timer_within_10_s(engine: FakeEngine) -> None:
    """No timer of asyncio's event loop is due within 10 s; uvloop does not list its timers."""
    with serving(engine, loop="asyncio") as server:
        assert httpx.get(f"{server.url}/health").status_code == 200
        due: list[float] = []
        collected = threading.Event()

        def look() -> None:
            loop: Any = server._loop
            due.extend(timer.when() - loop.time() for timer in loop._scheduled if not timer.cancelled())
            collected.set()

        server.call(look)
        assert collected.wait(60)
    assert all(seconds > 10 for seconds in due), f"{due}"


@pytest.mark.parametrize(
    "raw, expected",
    [
        (b"nonsense\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"GET /\x00 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nbad header\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 100 + b"\r\n", 431),
        (b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 101, 431),
        (b"GET /health HTTP/1.1\r\nHost: x\r\na: b\r\n" + b" b\r\n" * 101, 431),
        (b"GET /health HTTP/1.1\r\nHost: x\r\na: " + b"b" * 600_000, 431),
        (b"GET /health?" + b"b" * 600_000, 431),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello", 400),
        (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\nZZ\r\nhello\r\n",
            400,
        ),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked, gzip\r\n\r\n", 400),
    ],
)
def test_malformed_http_gets_openais_error_format(engine: FakeEngine, raw: bytes, expected: int) -> None:
    with serving(engine, h11_max_header_count=100, h11_max_incomplete_event_size=65536) as server:
        assert _post(server.url).status_code == 200
        head, _, body = _talk(server.url, raw).partition(b"\r\n\r\n")
        assert int(head.split()[1]) == expected, head
        assert json.loads(body)["error"]["type"] == "invalid_request_error"
        assert _post(server.url).status_code == 200


def test_unusual_but_valid_http_gets_the_expected_status(engine: FakeEngine) -> None:
    with serving(engine) as server:
        assert _post(server.url).status_code == 200
        body = b'{"prompt": "a"}'
        chunked = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
        for raw, status in (
            (head + b"Transfer-Encoding: chunked\r\n\r\n" + chunked, 200),
            (head + b"Expect: 100-continue\r\nContent-Length: 15\r\n\r\n" + body, 200),
            (b"HEAD /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 405),
            (b"OPTIONS * HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 404),
            (b"BREW /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 405),
            (b"GET /v1/%ff%00%2e%2e/x HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 404),
            (
                b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n"
                b"Sec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13\r\n\r\n",
                200,
            ),
        ):
            answer = _talk(server.url, raw).removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
            assert int(answer.split()[1]) == status, raw
            assert b"\r\ndate: " in answer


def _talk(url: str, raw: bytes) -> bytes:
    """Return the server's response to some bytes, until it closes the connection."""
    parts = httpx.URL(url)
    with socket.create_connection((parts.host, parts.port or 0), timeout=60) as connection:
        connection.sendall(raw)
        received = b""
        while piece := connection.recv(65536):
            received += piece
        return received
