"""Facts reported by engines, and limits against malicious ones: small servers on sockets."""

from __future__ import annotations

import asyncio
import gzip
import socket
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from stoker_operator.cluster import engine_facts
from stoker_operator.cluster.engine_facts import EngineFacts, metrics_url
from stoker_operator.objects.facts import Key, Reported

from ...support.waiting import until

KEY = Key("ns", "demo")
METRICS = b"""# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="1234",num_gpu_blocks_override="None"} 1.0
"""

Talk = Callable[[socket.socket], None]


def answer(body: bytes = METRICS, *headers: bytes, status: bytes = b"200 OK") -> Talk:
    lines = [b"HTTP/1.1 " + status, b"Content-Length: %d" % len(body), *headers, b"", body]
    return lambda connection: connection.sendall(b"\r\n".join(lines))


def endlessly(first: bytes, more: bytes) -> Talk:
    def talk(connection: socket.socket) -> None:
        connection.sendall(first)
        while True:
            connection.sendall(more)

    return talk


class Server:
    """Responds to every connection with the same function, and counts connections."""

    def __init__(self, talk: Talk) -> None:
        self._talk = talk
        self.requests: list[bytes] = []
        self.ending = threading.Event()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}/metrics"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                self.requests.append(connection.recv(65536))
                self._talk(connection)
            except OSError:
                pass  # the client closed the connection

    def close(self) -> None:
        self.ending.set()
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()


@pytest.fixture
def serve() -> Iterator[Callable[[Talk], Server]]:
    servers: list[Server] = []

    def make(talk: Talk) -> Server:
        servers.append(Server(talk))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


def ask(server: Server, seconds: float = 10) -> Reported | None:
    return asyncio.run(engine_facts.ask(server.url, seconds))


def test_number_of_kv_blocks_is_read_from_metrics(serve: Any) -> None:
    server = serve(answer())
    assert ask(server) == Reported(1234)
    assert b"Accept-Encoding: identity" in server.requests[0]


MODEL = (
    b'stoker:model_info{dtype="float32",engine="0",kv_cache_dtype="fp8_e4m3",model_name="m",weights="gptq (uint4 in '
    b'groups of 128)"} 1.0\n'
)


def test_storage_of_weights_and_cache_is_read_from_metrics(serve: Any) -> None:
    metrics = METRICS.replace(b"{block_size", b'{cache_dtype="fp8",block_size')
    assert ask(serve(answer(metrics))) == Reported(1234, "fp8"), "vLLM reports only the cache's format"
    assert ask(serve(answer(metrics + MODEL))) == Reported(1234, "fp8_e4m3", "gptq (uint4 in groups of 128)")


@pytest.mark.parametrize(
    ("good", "bad"),
    [(b"fp8_e4m3", b"x" * 300), (b"fp8_e4m3", b"<script>"), (b"fp8_e4m3", b"\xff\xfe"), (b"fp8_e4m3", b"\\n")],
)
def test_malformed_format_names_are_dropped(serve: Any, good: bytes, bad: bytes) -> None:
    reported = ask(serve(answer(METRICS + MODEL.replace(good, bad))))
    assert reported == Reported(1234, "", "gptq (uint4 in groups of 128)")


def test_metrics_url_follows_the_containers_port_and_scheme() -> None:
    container: dict[str, Any] = {"ports": [{"name": "http", "containerPort": 8000}]}
    assert metrics_url(container, "10.0.0.1") == "http://10.0.0.1:8000/metrics"
    container["readinessProbe"] = {"httpGet": {"scheme": "HTTPS"}}
    assert metrics_url(container, "fd00::1") == "https://[fd00::1]:8000/metrics"


@pytest.mark.parametrize(
    "talk",
    [
        answer(b""),
        answer(METRICS.replace(b"1234", b"None")),
        answer(METRICS.replace(b"1234", b"9" * 5000)),
        answer(METRICS.replace(b"1234", "²".encode())),
        answer(status=b"500 Oops"),
        answer(gzip.compress(METRICS), b"Content-Encoding: gzip"),
        lambda connection: connection.sendall(b"\x16\x03\x01 no HTTP\r\n\r\n"),
        lambda connection: connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n" + METRICS),
        lambda connection: None,
    ],
    ids=["empty", "None", "huge", "superscript", "status", "gzip", "no-http", "cut", "silent"],
)
def test_malformed_responses_are_ignored(serve: Any, talk: Talk) -> None:
    assert ask(serve(talk)) is None


def test_redirects_are_not_followed(serve: Any) -> None:
    elsewhere = serve(answer())
    redirect = serve(answer(b"", b"Location: " + elsewhere.url.encode(), status=b"302 Found"))
    assert ask(redirect) is None
    assert not elsewhere.requests


@pytest.mark.parametrize(
    "talk",
    [
        endlessly(b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 65536),
        endlessly(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n", gzip.compress(bytes(10_000_000))),
        endlessly(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"10000\r\n" + b"x" * 65536 + b"\r\n"),
        endlessly(b"HTTP/1.1 200 OK\r\nX: ", b"x" * 65536),
        endlessly(b"HTTP/1.1 200 OK\r\n", b"X: y\r\n" * 10_000),
    ],
    ids=["body", "gzip", "chunks", "header", "headers"],
)
def test_endless_responses_take_bounded_memory(serve: Any, talk: Talk) -> None:
    server = serve(talk)
    tracemalloc.start()
    try:
        assert ask(server, seconds=60) is None  # the size limit ends it
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 16 << 20


@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 200 OK\r\n\r\n"])
def test_slow_response_ends_at_the_timeout(serve: Any, head: bytes) -> None:
    def drip(connection: socket.socket) -> None:
        connection.sendall(head)
        while not server.ending.wait(0.05):
            connection.sendall(b"x")

    server = serve(drip)
    assert ask(server, seconds=0.3) is None  # that the call returns at all


def test_hostile_server_delays_no_caller_and_no_other_server(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_facts, "_TIMEOUT_SECONDS", 3600)
    reported_keys: list[Key] = []
    came = threading.Event()

    def tell(key: Key) -> None:
        reported_keys.append(key)
        came.set()

    clock = 1000.0
    facts = EngineFacts(tell, lambda: clock)
    hung = serve(lambda connection: server_waits(hung))
    honest = serve(answer())
    for number in range(10):
        hostile = Key("ns", f"hostile-{number}")
        for _ in range(100):
            assert facts.reported(hostile, "main", "pod", hung.url) is None
    assert facts.reported(KEY, "main", "pod-1", honest.url) is None
    assert came.wait(120)
    assert reported_keys == [KEY]
    assert facts.reported(KEY, "main", "pod-1", honest.url) == Reported(1234)
    assert len(honest.requests) == 1
    assert len(hung.requests) <= 10, "each pod gets one request at a time"
    assert facts.reported(KEY, "main", "pod-2", honest.url) is None, "another pod is polled first"
    assert facts.reported(KEY, "prefill", "pod-9", honest.url) is None, "another workload's pod is polled first"
    facts.forget(KEY)
    assert KEY not in facts._requests


def test_silent_engine_is_polled_again_after_a_pause(serve: Any) -> None:
    clock = 1000.0
    facts = EngineFacts(lambda key: None, lambda: clock)
    server = serve(answer(b""))
    for attempts in (1, 2):
        facts.reported(KEY, "main", "pod", server.url)
        until(lambda: not facts._requests[KEY]["main"].is_pending, "the poll has ended")
        facts.reported(KEY, "main", "pod", server.url)
        assert not facts._requests[KEY]["main"].is_pending
        assert len(server.requests) == attempts
        clock += 2


def server_waits(server: Server) -> None:
    server.ending.wait()
