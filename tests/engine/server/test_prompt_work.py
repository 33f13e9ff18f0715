"""Cost of prompts: none for prompts that are too long or whose client has gone. The engine is faked."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from .conftest import FakeEngine, Listen, wait_until
from .test_disconnect import open_request

LONG = "x" * 65
CHAT = [{"role": "user", "content": LONG}]


@pytest.mark.parametrize(
    "path, body, param",
    [
        ("/v1/completions", {"prompt": LONG}, "prompt"),
        ("/v1/completions", {"prompt": ["a", LONG]}, "prompt"),
        ("/v1/completions", {"prompt": [5] * 65, "echo": True}, "prompt"),
        ("/v1/chat/completions", {"messages": CHAT}, "messages"),
        ("/tokenize", {"prompt": LONG}, "prompt"),
        ("/tokenize", {"messages": CHAT}, "messages"),
    ],
)
def test_too_long_prompts_are_not_encoded(
    client: TestClient, engine: FakeEngine, path: str, body: dict[str, Any], param: str
) -> None:
    answer = client.post(path, json=body)
    assert answer.status_code == 400
    assert (answer.json()["error"]["code"], answer.json()["error"]["param"]) == ("context_length_exceeded", param)
    assert not engine.tokenizer.encoded
    assert not engine.requests_seen


@pytest.mark.parametrize(
    "path, subject",
    [
        ("/v1/completions", {"prompt": LONG}),
        ("/v1/completions", {"prompt": [5] * 65}),
        ("/v1/chat/completions", {"messages": CHAT}),
    ],
)
def test_truncated_prompts_may_have_any_length(
    client: TestClient, engine: FakeEngine, path: str, subject: dict[str, Any]
) -> None:
    answer = client.post(path, json={**subject, "truncate_prompt_tokens": 3})
    assert answer.status_code == 200
    assert len(engine.requests_seen[0][0]) == 3


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize("stream", [True, False])
def test_disconnecting_ends_the_work_for_the_prompt(
    engine: FakeEngine, app: FastAPI, listen: Listen, monkeypatch: pytest.MonkeyPatch, path: str, stream: bool
) -> None:
    started, ended = threading.Event(), threading.Event()

    async def endless(texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        raise AssertionError

    monkeypatch.setattr(engine.tokenizer, "encode", endless)
    with listen(app) as address:
        with open_request(address, path, stream):
            wait_until(started.is_set)
            assert not ended.is_set()
        wait_until(ended.is_set)
    assert not engine.requests_seen
