"""A disconnected client's resources are freed. Sockets are real; the first tests fake the engine."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import pytest
from fastapi import FastAPI

from .conftest import FakeEngine, Listen, sample, wait_until


@pytest.fixture
def fake_address(app: FastAPI, listen: Listen) -> Iterator[tuple[str, int]]:
    with listen(app) as address:
        yield address


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize("tokens_before", [0, 3])
@pytest.mark.parametrize("stream", [True, False])
def test_disconnecting_ends_the_request(
    engine: FakeEngine, fake_address: tuple[str, int], path: str, tokens_before: int, stream: bool
) -> None:
    engine.hangs_at = tokens_before
    with open_request(fake_address, path, stream):
        wait_until(lambda: bool(engine.alive))
        assert engine.alive
    wait_until(lambda: not engine.alive)


def test_disconnecting_ends_every_prompt(engine: FakeEngine, fake_address: tuple[str, int]) -> None:
    engine.hangs_at = 0
    with open_request(fake_address, "/v1/completions", True, prompt=["a", "b", "c"]):
        wait_until(lambda: len(engine.alive) == 3)
    wait_until(lambda: not engine.alive)


def test_disconnecting_leaves_other_requests_running(engine: FakeEngine, fake_address: tuple[str, int]) -> None:
    engine.hangs_at = 3
    with (
        open_request(fake_address, "/v1/completions", True) as leaver,
        open_request(fake_address, "/v1/completions", True),
    ):
        wait_until(lambda: len(engine.alive) == 2)
        leaver.close()
        wait_until(lambda: len(engine.alive) == 1)
        engine.hangs_at = None
        host, port = fake_address
        answer = httpx.post(f"http://{host}:{port}/v1/completions", json={"prompt": "a"}, timeout=60)
        assert answer.json()["choices"][0]["text"] == "hello world"
        assert len(engine.alive) == 1


@pytest.mark.parametrize("stream", [True, False])
def test_disconnecting_frees_blocks(address: str, stream: bool) -> None:
    parts = urlsplit(address)
    where = (str(parts.hostname), int(parts.port or 0))
    aborted = sample(address, "vllm:request_success_total", finished_reason="abort")
    with open_request(where, "/v1/completions", stream, max_tokens=450, n=64):  # long enough not to finish earlier
        wait_until(lambda: sample(address, "vllm:kv_cache_usage_perc") > 0)
    wait_until(lambda: sample(address, "vllm:request_success_total", finished_reason="abort") == aborted + 1)
    assert sample(address, "vllm:kv_cache_usage_perc") == 0
    assert sample(address, "vllm:num_requests_running") == 0


def open_request(address: tuple[str, int], path: str, stream: bool, **fields: object) -> socket.socket:
    """Return a connection whose request is sent and whose response is not read."""
    messages = [{"role": "user", "content": "hi"}]
    subject = {"/v1/chat/completions": {"messages": messages}, "/v1/responses": {"input": "hi"}}.get(path)
    extra = {} if path == "/tokenize" else {"ignore_eos": True, "stream": stream}
    body = json.dumps({**(subject or {"prompt": "hi"}), **extra, **fields}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    connection = socket.create_connection(address)
    connection.sendall(head.encode() + body)
    return connection
