"""The answers: whole and streamed, one prompt and several."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from .conftest import FakeEngine

MESSAGES = [{"role": "user", "content": "hi"}]


def events(client: TestClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream that ends well."""
    response = client.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *data, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in data]


def test_completion(client: TestClient) -> None:
    answer = client.post("/v1/completions", json={"model": "alias", "prompt": "abc"}).json()
    assert answer["id"].startswith("cmpl-")
    assert (answer["object"], answer["model"]) == ("text_completion", "tiny")
    assert answer["choices"] == [{"index": 0, "text": "hello world", "logprobs": None, "finish_reason": "stop"}]
    assert answer["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 11,
        "total_tokens": 15,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


@pytest.mark.parametrize("prompt", [["ab", "c"], [[1, 97, 98], [1, 99]]])
def test_each_prompt_gets_a_choice(client: TestClient, engine: FakeEngine, prompt: Any) -> None:
    answer = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 5}).json()
    assert [(c["index"], c["text"], c["finish_reason"]) for c in answer["choices"]] == [
        (0, "hello", "length"),
        (1, "hello", "length"),
    ]
    assert answer["usage"]["prompt_tokens"] == 5
    assert [asked for asked, _ in engine.asked] == [[1, 97, 98], [1, 99]]


def test_a_list_of_tokens_is_one_prompt(client: TestClient, engine: FakeEngine) -> None:
    client.post("/v1/completions", json={"prompt": [5, 6]})
    assert [asked for asked, _ in engine.asked] == [[5, 6]]


def test_streams_of_several_prompts_are_merged(client: TestClient) -> None:
    got = events(client, "/v1/completions", {"prompt": ["a", "b", "c"]})
    assert {event["id"] for event in got} == {got[0]["id"]}
    for index in range(3):
        choices = [choice for event in got for choice in event["choices"] if choice["index"] == index]
        assert "".join(choice["text"] for choice in choices) == "hello world"
        assert [choice["finish_reason"] for choice in choices] == [None] * 10 + ["stop"]
    assert [event["choices"][0]["index"] for event in got[:3]] == [0, 1, 2], "side by side, not one after another"


def test_usage_is_the_last_event_when_asked_for(client: TestClient) -> None:
    for path, body in (("/v1/completions", {"prompt": "abc"}), ("/v1/chat/completions", {"messages": MESSAGES})):
        assert not any("usage" in event for event in events(client, path, body))
        *others, last = events(client, path, {**body, "stream_options": {"include_usage": True}})
        assert not any("usage" in event for event in others)
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 11
        assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


def test_chat(client: TestClient) -> None:
    answer = client.post("/v1/chat/completions", json={"messages": MESSAGES}).json()
    assert answer["id"].startswith("chatcmpl-")
    assert (answer["object"], answer["model"]) == ("chat.completion", "tiny")
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hello world", "refusal": None}
    assert (choice["index"], choice["finish_reason"]) == (0, "stop")
    assert answer["usage"]["total_tokens"] == len("<user>hi") + 11


def test_chat_stream(client: TestClient) -> None:
    got = events(client, "/v1/chat/completions", {"messages": MESSAGES, "max_completion_tokens": 3})
    assert {event["object"] for event in got} == {"chat.completion.chunk"}
    choices = [event["choices"][0] for event in got]
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": ""},
        {"content": "h"},
        {"content": "e"},
        {"content": "l"},
    ]
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, "length"]


def test_token_ids_when_asked_for(client: TestClient) -> None:
    ids = {"return_token_ids": True, "max_tokens": 3}
    completion = client.post("/v1/completions", json={"prompt": "a", **ids}).json()["choices"][0]
    assert (completion["prompt_token_ids"], completion["token_ids"]) == ([1, 97], [104, 101, 108])
    chat = client.post("/v1/chat/completions", json={"messages": MESSAGES, **ids}).json()
    assert chat["prompt_token_ids"] == [ord(character) for character in "<user>hi"]
    assert chat["choices"][0]["token_ids"] == [104, 101, 108]


def test_token_ids_in_streams(client: TestClient) -> None:
    ids = {"return_token_ids": True, "max_tokens": 3}
    choices = [event["choices"][0] for event in events(client, "/v1/completions", {"prompt": "a", **ids})]
    assert [choice.get("prompt_token_ids") for choice in choices] == [[1, 97], None, None]
    assert [choice["token_ids"] for choice in choices] == [[104], [101], [108]]
    first, *rest = events(client, "/v1/chat/completions", {"messages": MESSAGES, **ids})
    assert first["prompt_token_ids"] == [ord(character) for character in "<user>hi"]
    assert [event["choices"][0]["token_ids"] for event in rest] == [[104], [101], [108]]


def test_models(client: TestClient) -> None:
    cards = client.get("/v1/models").json()
    assert cards["object"] == "list"
    assert [card["id"] for card in cards["data"]] == ["tiny", "alias"]
    card = cards["data"][0]
    assert card["created"] > 0
    assert {key: card[key] for key in card if key not in ("id", "created")} == {
        "object": "model",
        "owned_by": "stoker",
        "root": "/models/tiny",
        "max_model_len": 64,
    }
    assert client.get("/v1/models/tiny").json() == card


def test_version_and_health(client: TestClient, engine: FakeEngine) -> None:
    assert client.get("/version").json()["version"]
    assert client.get("/health").status_code == 200
    engine.is_healthy = False
    response = client.get("/health")
    assert response.status_code == 503
    assert response.json()["error"]["type"] == "internal_error"
