"""A stream to a client slower than the engine has fewer events, and the same content.

It uses real sockets. The operating system buffers kilobytes for a client that does not read; these streams have
hundreds. The expected content is the same server's response without streaming.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest

from .conftest import FakeEngine, Serving, serving_fake, wait_until

LENGTH = 1200
MESSAGES = [{"role": "user", "content": "abc"}]
COMPLETION = ("/v1/completions", {"prompt": "abc", "max_tokens": LENGTH})
CHAT = ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": LENGTH})


@contextmanager
def streaming(server: Serving, path: str, body: dict[str, Any]) -> Iterator[socket.socket]:
    """Open a connection with small buffers, request a stream, and read nothing."""
    data = json.dumps({**body, "stream": True}).encode()
    url = httpx.URL(server.url)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(60)
        connection.connect((url.host, url.port))
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
        connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        yield connection


def events(connection: socket.socket) -> list[Any]:
    """Return all events of a stream that ends without error."""
    received = b""
    while piece := connection.recv(65536):
        received += piece
    head, _, chunks = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    stream = b""
    while chunks:
        size, _, chunks = chunks.partition(b"\r\n")
        stream, chunks = stream + chunks[: int(size, 16)], chunks[int(size, 16) + 2 :]
    *lines, done, end = stream.decode().split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@contextmanager
def served(engine: FakeEngine) -> Iterator[Serving]:
    """Serve an engine whose output exceeds the buffers of a client that does not read."""
    engine.info = replace(engine.info, max_model_len=10**6)
    engine.answer = "".join(chr(0x61 + 7 * i % 500) for i in range(LENGTH))
    with serving_fake(engine) as server:
        yield server


def all_generated(engine: FakeEngine) -> bool:
    return all(answer.done() for answer in engine._answers.values()) and bool(engine._answers)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("path, body", [COMPLETION, CHAT])
@pytest.mark.parametrize("logprobs", [False, True])
def test_a_slow_client_gets_the_same_content_in_fewer_events(
    engine: FakeEngine, path: str, body: dict[str, Any], n: int, logprobs: bool
) -> None:
    is_chat = path == CHAT[0]
    body = {**body, "n": n, "return_token_ids": True}
    if logprobs:
        body |= {"logprobs": True, "top_logprobs": 2} if is_chat else {"logprobs": 2}
    with served(engine) as server:
        engine.waits_for_reader = False
        whole = httpx.post(server.url + path, json=body, timeout=60).json()
        options = {"include_usage": True, "continuous_usage_stats": True}
        with streaming(server, path, {**body, "stream_options": options}) as connection:
            wait_until(lambda: all_generated(engine))
            *came, last = events(connection)
    assert last["usage"] == whole["usage"]
    assert sum(len(event["choices"]) for event in came) < LENGTH * n / 2
    for expected in whole["choices"]:
        mine = [(e["choices"][0], e.get("usage")) for e in came if e["choices"][0]["index"] == expected["index"]]
        choices = [choice for choice, _ in mine]
        pieces = [(c["delta"].get("content") or "") if is_chat else c["text"] for c in choices]
        text = "".join(chr(ord(character) + expected["index"]) for character in engine.answer)
        assert "".join(pieces) == text == (expected["message"]["content"] if is_chat else expected["text"])
        tokens = [c.get("token_ids") or [] for c in choices]
        assert [token for some in tokens for token in some] == expected["token_ids"]
        assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["length"]
        counted = [usage["completion_tokens"] for _, usage in mine if usage is not None]
        assert counted == sorted(counted) and counted[-1] == LENGTH
        if logprobs:
            for name, value in expected["logprobs"].items():
                if value is not None:
                    assert [v for c in choices if c["logprobs"] for v in c["logprobs"][name]] == value
            with_logprobs = [c for c in choices if c["logprobs"]]
            entries = "content" if is_chat else "tokens"
            assert all(len(c["logprobs"][entries]) == len(c["token_ids"]) for c in with_logprobs)


def test_a_fast_client_gets_one_event_per_token(engine: FakeEngine) -> None:
    with served(engine) as server, streaming(server, *COMPLETION) as connection:
        assert len(events(connection)) == LENGTH


def test_events_are_merged_for_each_prompt_of_a_request(engine: FakeEngine) -> None:
    engine.waits_for_reader = False
    with served(engine) as server:
        body = {**COMPLETION[1], "prompt": ["a", "bc"], "stream_options": {"include_usage": True}}
        with streaming(server, COMPLETION[0], body) as connection:
            wait_until(lambda: all_generated(engine))
            *came, last = events(connection)
    for index in range(2):
        choices = [event["choices"][0] for event in came if event["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in choices) == engine.answer
        assert choices[-1]["finish_reason"] == "length"
    assert last["usage"]["completion_tokens"] == 2 * LENGTH


@pytest.mark.parametrize("path, body", [COMPLETION, CHAT])
def test_disconnecting_with_unsent_text_ends_the_request(engine: FakeEngine, path: str, body: dict[str, Any]) -> None:
    engine.waits_for_reader = False
    engine.hangs_at = LENGTH - 1
    with served(engine) as server:
        with streaming(server, path, body) as connection:
            wait_until(lambda: bool(engine.alive))
            assert connection.recv(10)
        wait_until(lambda: not engine.alive and not server.service.lifecycle.in_flight)
