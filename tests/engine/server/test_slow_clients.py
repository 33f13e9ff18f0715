"""Clients that send or read so slowly that they would occupy the server forever.

First with real sockets and short limits, waiting for what must happen; then, for what must not happen, with a fake
transport in virtual time.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import httpx
import pytest
from uvicorn.config import Config
from uvicorn.server import ServerState

from stoker_engine.contract.frontend_args import FrontendArgs
from stoker_engine.server.http.http_protocol import http_protocol

from ...support.virtual_time import elapse
from .conftest import FakeEngine, Serving, wait_until
from .conftest import serving_fake as serving

VirtualTime = Callable[[Callable[[], Coroutine[Any, Any, None]]], None]

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


def _connect(url: str) -> socket.socket:
    """Open a connection with a small receive buffer."""
    parts = httpx.URL(url)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(60)
    connection.connect((parts.host, parts.port))
    return connection


def _talk(server: Serving, *pieces: bytes) -> bytes:
    """Return everything received until the connection is closed."""
    received = b""
    with _connect(server.url) as connection:
        for piece in pieces:
            connection.sendall(piece)
        while piece := connection.recv(65536):
            received += piece
    return received


def _assert_timed_out(answer: bytes) -> None:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert b"\r\ndate: " in head
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("sent", [b"G", b"GET /health HTTP/1.1\r\n", b"GET /health HTTP/1.1\r\nHost: x\r\na: b\r\n"])
def test_an_incomplete_head_is_408(engine: FakeEngine, sent: bytes) -> None:
    with serving(engine, request_header_timeout=0.1) as server:
        _assert_timed_out(_talk(server, sent))


def test_an_endless_head_is_cut_off(engine: FakeEngine) -> None:
    with serving(engine, request_header_timeout=0.1) as server, _connect(server.url) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\na: ")
        for _ in range(4 * 10**6):
            try:
                connection.send(b"b")
            except OSError:
                return
        pytest.fail("the server reads an endless head")


def test_an_incomplete_second_head_is_408(engine: FakeEngine) -> None:
    with serving(engine, request_header_timeout=0.1) as server:
        answers = _talk(server, b"GET /version HTTP/1.1\r\nHost: x\r\n\r\nGET /ver")
        first, second = answers.split(b"HTTP/1.1 ")[1:]
        assert first.startswith(b"200 ")
        _assert_timed_out(b"HTTP/1.1 " + second)


@pytest.mark.parametrize(
    "sent",
    [
        HEAD % 1000,
        HEAD % 1000 + b'{"prompt": "a"',
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nTrailer: a",
    ],
)
def test_an_incomplete_body_is_408(engine: FakeEngine, sent: bytes) -> None:
    with serving(engine, request_body_timeout=0.1) as server:
        _assert_timed_out(_talk(server, sent))
        wait_until(lambda: server.service.lifecycle.in_flight == 0)
        assert not engine.requests_seen


def test_an_unread_body_does_not_keep_its_connection_open(engine: FakeEngine) -> None:
    with serving(engine, request_body_timeout=0.1) as server:
        answer = _talk(server, b"GET /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 404 ")
        assert answer.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_does_not_read_is_cut_off(engine: FakeEngine, stream: bool) -> None:
    """A stream is cut long before its end, although its events would fit into default socket buffers; and a complete
    response does not occupy its connection.
    """
    engine.info = replace(engine.info, max_model_len=10**6)
    engine.answer = "x" * 5000 if stream else "€" * 2000
    engine.hangs_at = 3000  # only an abort ends the stream
    body = json.dumps({"prompt": "a", "max_tokens": len(engine.answer), "stream": stream, "n": 1 if stream else 64})
    with serving(engine, send_timeout=0.2) as server, _connect(server.url) as connection:
        connection.sendall(HEAD % len(body) + body.encode())
        wait_until(lambda: bool(engine.requests_seen))
        wait_until(lambda: not engine.alive and not server.service.lifecycle.in_flight)
        wait_until(lambda: not server.server.server_state.connections)


class FakeTransport(asyncio.Transport):
    """Keeps written data, of which `buffered` bytes are unsent."""

    def __init__(self) -> None:
        super().__init__({"socket": socket.socket()})
        self.written = b""
        self.buffered = 0
        self.ended: str | None = None

    def write(self, data: Any) -> None:
        self.written += data

    def get_write_buffer_size(self) -> int:
        return self.buffered

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def is_reading(self) -> bool:
        return True

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def can_write_eof(self) -> bool:
        return False

    def is_closing(self) -> bool:
        return self.ended is not None

    def close(self) -> None:
        self.ended = self.ended or "closed"

    def abort(self) -> None:
        self.ended = "aborted"


async def echo_length(scope: Any, receive: Any, send: Any) -> None:
    """Respond with the length of a request's body."""
    length = 0
    while True:
        message = await receive()
        length += len(message.get("body", b""))
        if not message.get("more_body"):
            break
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"8")]})
    await send({"type": "http.response.body", "body": b"%8d" % length})


class Connected:
    """A connection with a fake transport."""

    def __init__(self, **frontend: Any) -> None:
        config = Config(echo_length, log_config=None, lifespan="off", timeout_keep_alive=75)
        config.load()
        self.transport = FakeTransport()
        self.protocol = http_protocol(FrontendArgs(**frontend))(config, ServerState(), {})
        self.protocol.connection_made(self.transport)

    async def send(self, data: bytes, seconds: float = 0) -> None:
        """Send bytes, and let time pass."""
        self.protocol.data_received(data)
        await elapse(seconds)

    @property
    def status(self) -> int:
        return int(self.transport.written.split()[1]) if self.transport.written else 0


def test_a_slow_head_is_accepted(virtual_time: VirtualTime) -> None:
    async def main() -> None:
        connected = Connected()
        for byte in b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r":
            await connected.send(bytes([byte]), 1)
        assert connected.status == 0
        await connected.send(b"\n", 1)
        assert connected.status == 200

    virtual_time(main)


def test_the_header_timeout_covers_the_whole_head(virtual_time: VirtualTime) -> None:
    async def main() -> None:
        connected = Connected()
        await connected.send(b"GET / HTTP/1.1\r\nHost: x\r\na: ")
        for _ in range(60):
            assert connected.status == 0
            await connected.send(b"b" * 1000, 1)
        assert connected.status == 408
        assert connected.transport.ended

    virtual_time(main)


def test_a_slow_body_is_accepted(virtual_time: VirtualTime) -> None:
    """In pieces far apart, for hours."""

    async def main() -> None:
        connected = Connected()
        await connected.send(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3000000\r\n\r\n")
        for _ in range(200):
            await connected.send(b"a" * 14_400, 55)
            assert connected.status == 0
        await connected.send(b"a" * (3_000_000 - 200 * 14_400), 1)
        assert connected.status == 200
        assert b" 3000000" in connected.transport.written

    virtual_time(main)


@pytest.mark.parametrize("first", [b"", b"a" * 10**6])
def test_a_body_below_the_minimum_rate_is_408(virtual_time: VirtualTime, first: bytes) -> None:
    """Regardless of earlier speed: a client cannot accumulate time."""

    async def main() -> None:
        connected = Connected()
        await connected.send(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3000000\r\n\r\n" + first)
        for _ in range(120):
            await connected.send(b"a" * 200, 1)
        assert connected.status == 408

    virtual_time(main)


def test_a_minimum_rate_of_0_accepts_any_body_rate(virtual_time: VirtualTime) -> None:
    async def main() -> None:
        connected = Connected(min_request_body_data_rate=0)
        await connected.send(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n")
        for _ in range(100):
            await connected.send(b"a", 50)
        assert connected.status == 200

    virtual_time(main)


def test_a_minimum_rate_of_0_refuses_a_body_without_progress(virtual_time: VirtualTime) -> None:
    async def main() -> None:
        connected = Connected(min_request_body_data_rate=0, request_body_timeout=7)
        await connected.send(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n", 15)
        assert connected.status == 408
        assert b"no byte of its body arrived for 7 s" in connected.transport.written

    virtual_time(main)


def test_a_slow_reader_is_served(virtual_time: VirtualTime) -> None:
    """The client reads a byte shortly before each deadline; then it stops."""

    async def main() -> None:
        connected = Connected()
        connected.transport.buffered = 1000
        await connected.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        connected.protocol.pause_writing()
        for _ in range(500):
            await elapse(59)
            connected.transport.buffered -= 1
        assert connected.transport.ended != "aborted"
        await elapse(121)
        assert connected.transport.ended == "aborted"

    virtual_time(main)


def test_a_client_that_has_read_everything_has_no_deadline(virtual_time: VirtualTime) -> None:
    async def main() -> None:
        connected = Connected()
        connected.protocol.pause_writing()
        await elapse(59)
        connected.protocol.resume_writing()
        await elapse(10)
        assert not connected.transport.ended

    virtual_time(main)


def test_silent_connections_are_closed_like_idle_ones(virtual_time: VirtualTime) -> None:
    async def main() -> None:
        silent, used = Connected(), Connected()
        await elapse(70)
        await used.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", 70)
        assert silent.transport.ended == "closed"
        assert not silent.transport.written
        assert not used.transport.ended
        await elapse(6)
        assert used.transport.ended == "closed"

    virtual_time(main)


def test_timeouts_of_0_disable_the_limits(virtual_time: VirtualTime) -> None:
    async def main() -> None:
        connected = Connected(request_header_timeout=0, request_body_timeout=0, send_timeout=0)
        await connected.send(b"POST / HTTP/1.1\r\nHost: x\r\n", 10**6)
        await connected.send(b"Content-Length: 2\r\n\r\n", 10**6)
        connected.protocol.pause_writing()
        await elapse(10**6)
        connected.protocol.resume_writing()
        await connected.send(b"{}", 1)
        assert connected.status == 200

    virtual_time(main)
