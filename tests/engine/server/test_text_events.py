"""Encoded events equal those that are built; a directly written body equals one that passes the middleware."""

from __future__ import annotations

import json
import socket

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from stoker_engine.core.outputs import OutputDelta
from stoker_engine.core.sampling_params import RequestParams
from stoker_engine.server.conversation.text_events import TextEvents, encoded

from .conftest import FakeEngine, Serving, serving_fake
from .scripted_engine import ScriptedEngine

TEXTS = st.text(st.characters(codec="utf-8"), max_size=40)


class Delta(BaseModel):
    """Has the text twice, as reasoning has."""

    reasoning: str
    reasoning_content: str


class Named(BaseModel):
    """An event with a name, an id that a client chose, and a text."""

    type: str = "delta"
    id: str
    delta: Delta
    finish_reason: None = None


@given(
    texts=st.lists(TEXTS, max_size=4),
    id=TEXTS | st.sampled_from(['"\\u0000text\\u0000"', "\\u0000text\\u0000", "text", '"', "\x00"]),
)
def test_text_events_equal_built_events(texts: list[str], id: str) -> None:
    def event(text: str) -> Named:
        return Named(id=id, delta=Delta(reasoning=text, reasoning_content=text))

    events = TextEvents(event)
    for text in texts:
        assert events.encoded(text) == encoded(event(text))


BODIES = {
    "/v1/completions": {"prompt": "ab", "max_tokens": 40},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 40},
    "/v1/responses": {"input": "ab", "max_output_tokens": 40},
    "/v1/messages": {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 40, "model": "tiny"},
}


def raw(server: Serving, path: str, version: str) -> bytes:
    """Return what the server sends for a streamed request with this version of HTTP."""
    url, data = httpx.URL(server.url), json.dumps({**BODIES[path], "stream": True}).encode()
    head = f"POST {path} HTTP/{version}\r\nHost: x\r\nX-Request-Id: i\r\nContent-Type: application/json\r\n"
    with socket.create_connection((url.host, url.port), timeout=60) as connection:
        connection.sendall(f"{head}Connection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        received = b""
        while piece := connection.recv(65536):
            received += piece
    return received


def lines(body: bytes) -> list[bytes]:
    """Return the lines of a body's events without what differs between two requests."""
    kept = []
    for line in body.split(b"\n"):
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            for part in (event, event.get("response", {}), event.get("item", {}), event.get("message", {})):
                for name in ("id", "item_id", "created", "created_at", "completed_at", "output"):
                    part.pop(name, None)
            line = json.dumps(event).encode()
        kept.append(line)
    return kept


@pytest.mark.parametrize("path", BODIES)
def test_an_http_1_0_client_gets_the_same_events_without_chunks(engine: FakeEngine, path: str) -> None:
    engine.answer = 'häßlich \U0001f600 "quoted"\n\\ ' * 2
    with serving_fake(engine) as server:
        old_head, _, old_body = raw(server, path, "1.0").partition(b"\r\n\r\n")
        head, _, chunks = raw(server, path, "1.1").partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head.lower() and b"transfer-encoding" not in old_head.lower()
    body = b""
    while chunks:
        size, _, chunks = chunks.partition(b"\r\n")
        body, chunks = body + chunks[: int(size, 16)], chunks[int(size, 16) + 2 :]
    assert lines(body) == lines(old_body)
    assert len(lines(body)) > len(engine.answer)


@pytest.mark.parametrize("by_flag", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_an_interval_joins_tokens_after_the_first(engine: FakeEngine, path: str, n: int, by_flag: bool) -> None:
    engine.answer = "abcdefghijklmnop"
    body = {**BODIES[path], "n": n, "stream": True, "return_token_ids": True, "stream_interval": 2 if by_flag else 5}
    with serving_fake(engine, stream_interval=5 if by_flag else 1) as server:
        text = httpx.post(server.url + path, json=body, timeout=60).text
    events = [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: {")]
    for index in range(n):
        choices = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        lengths = [len(choice["token_ids"]) for choice in choices if choice.get("token_ids")]
        assert lengths == [1, 5, 5, 5]
        assert choices[-1]["finish_reason"] == "stop"
        joined = "".join(
            choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices
        )
        assert joined == "".join(chr(ord(character) + index) for character in engine.answer)


class TextlessEngine(ScriptedEngine):
    """Its tokens `~` have no text."""

    def _next_delta(
        self, request_id: str, prompt: list[int], params: RequestParams, index: int, answer: str, num_written: int
    ) -> OutputDelta:
        delta = super()._next_delta(request_id, prompt, params, index, answer, num_written)
        delta.text = delta.text.replace("~", "")
        return delta


@pytest.mark.parametrize(
    "text, expected",
    [
        ("a~b", ["a", "", "b"]),
        ("<tool_call>~", ["<tool_call>"]),  # an incomplete call is content at the end
        ('x<tool_call>\n{"name": "weather", "arguments": {"city": "~~"}}\n</tool_call>', ["x"]),
    ],
)
def test_a_token_without_text_has_an_event_unless_a_parser_holds_text(text: str, expected: list[str]) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    body = {"messages": [{"role": "user", "content": "ab"}], "stream": True, "tools": [tool], "model": "tiny"}
    with serving_fake(TextlessEngine(text), tool_call_parser="hermes") as server:
        answer = httpx.post(server.url + "/v1/chat/completions", json=body, timeout=60).text
    events = [json.loads(line[6:]) for line in answer.split("\n") if line.startswith("data: {")]
    deltas = [event["choices"][0]["delta"] for event in events][1:]  # the first has the role
    assert [delta["content"] for delta in deltas if "content" in delta] == expected
