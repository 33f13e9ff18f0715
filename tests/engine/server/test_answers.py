"""Responses: whole and streamed, for one and several prompts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from starlette.testclient import TestClient

from stoker_engine.core.logprobs import Logprob

from . import conftest
from .conftest import FakeEngine, MakeClient

MESSAGES = [{"role": "user", "content": "hi"}]


def events(client: TestClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events of a stream that ends without error."""
    response = client.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *data, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in data]


def test_completions_have_openais_format(client: TestClient) -> None:
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
    assert [token_ids for token_ids, _ in engine.requests_seen] == [[1, 97, 98], [1, 99]]


def test_a_list_of_tokens_is_one_prompt(client: TestClient, engine: FakeEngine) -> None:
    client.post("/v1/completions", json={"prompt": [5, 6]})
    assert [token_ids for token_ids, _ in engine.requests_seen] == [[5, 6]]


def test_streams_of_several_prompts_are_merged(client: TestClient) -> None:
    events_sent = events(client, "/v1/completions", {"prompt": ["a", "b", "c"]})
    assert {event["id"] for event in events_sent} == {events_sent[0]["id"]}
    for index in range(3):
        choices = [choice for event in events_sent for choice in event["choices"] if choice["index"] == index]
        assert "".join(choice["text"] for choice in choices) == "hello world"
        assert [choice["finish_reason"] for choice in choices] == [None] * 10 + ["stop"]
    order = [event["choices"][0]["index"] for event in events_sent]
    ends = [len(order) - order[::-1].index(index) for index in range(3)]
    assert max(map(order.index, range(3))) < min(ends), "side by side, not one after another"


def test_usage_is_the_last_event_if_requested(client: TestClient) -> None:
    for path, body in (("/v1/completions", {"prompt": "abc"}), ("/v1/chat/completions", {"messages": MESSAGES})):
        assert not any("usage" in event for event in events(client, path, body))
        *others, last = events(client, path, {**body, "stream_options": {"include_usage": True}})
        assert not any("usage" in event for event in others)
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 11
        assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


def test_chats_have_openais_format(client: TestClient) -> None:
    answer = client.post("/v1/chat/completions", json={"messages": MESSAGES}).json()
    assert answer["id"].startswith("chatcmpl-")
    assert (answer["object"], answer["model"]) == ("chat.completion", "tiny")
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hello world", "refusal": None}
    assert (choice["index"], choice["finish_reason"]) == (0, "stop")
    assert answer["usage"]["total_tokens"] == len("<user>hi") + 11


def test_chat_streams_have_openais_format(client: TestClient) -> None:
    events_sent = events(client, "/v1/chat/completions", {"messages": MESSAGES, "max_completion_tokens": 3})
    assert {event["object"] for event in events_sent} == {"chat.completion.chunk"}
    choices = [event["choices"][0] for event in events_sent]
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": ""},
        {"content": "h"},
        {"content": "e"},
        {"content": "l"},
    ]
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, "length"]


def test_token_ids_are_returned_if_requested(client: TestClient) -> None:
    ids = {"return_token_ids": True, "max_tokens": 3}
    completion = client.post("/v1/completions", json={"prompt": "a", **ids}).json()["choices"][0]
    assert (completion["prompt_token_ids"], completion["token_ids"]) == ([1, 97], [104, 101, 108])
    chat = client.post("/v1/chat/completions", json={"messages": MESSAGES, **ids}).json()
    assert chat["prompt_token_ids"] == [ord(character) for character in "<user>hi"]
    assert chat["choices"][0]["token_ids"] == [104, 101, 108]


def test_streams_contain_token_ids_if_requested(client: TestClient) -> None:
    ids = {"return_token_ids": True, "max_tokens": 3}
    choices = [event["choices"][0] for event in events(client, "/v1/completions", {"prompt": "a", **ids})]
    assert [choice.get("prompt_token_ids") for choice in choices] == [[1, 97], None, None]
    assert [choice["token_ids"] for choice in choices] == [[104], [101], [108]]
    first, *rest = events(client, "/v1/chat/completions", {"messages": MESSAGES, **ids})
    assert first["prompt_token_ids"] == [ord(character) for character in "<user>hi"]
    assert [event["choices"][0]["token_ids"] for event in rest] == [[104], [101], [108]]


def test_models_lists_all_served_names(client: TestClient) -> None:
    cards = client.get("/v1/models").json()
    assert cards["object"] == "list"
    assert [card["id"] for card in cards["data"]] == ["tiny", "alias"]
    card = cards["data"][0]
    assert card["created"] > 0
    assert {key: card[key] for key in card if key not in ("id", "created")} == {
        "object": "model",
        "owned_by": "stoker",
        "root": "/models/tiny",
        "parent": None,
        "max_model_len": 64,
    }
    assert client.get("/v1/models/tiny").json() == card


def test_model_cards_contain_dtypes_and_quantization(make_client: MakeClient, engine: FakeEngine) -> None:
    reported = {"dtype": "bfloat16", "quantization": "gptq", "weights": "gptq (uint4 in groups of 128)"}
    engine.info = replace(engine.info, **reported, kv_cache_dtype="fp8")
    card = make_client().get("/v1/models/tiny").json()
    assert {key: card[key] for key in reported} == reported
    assert card["kv_cache_dtype"] == "fp8"


def test_model_cards_contain_the_licence(make_client: MakeClient, engine: FakeEngine) -> None:
    engine.info = replace(engine.info, licence="apache-2.0", model_card="https://example.com/card")
    card = make_client().get("/v1/models/tiny").json()
    assert (card["license"], card["model_card"]) == ("apache-2.0", "https://example.com/card")


def test_n_gives_n_choices_per_prompt(client: TestClient) -> None:
    answer = client.post("/v1/completions", json={"prompt": ["a", "b"], "n": 2, "max_tokens": 3}).json()
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [(0, "hel"), (1, "ifm"), (2, "hel"), (3, "ifm")]
    assert answer["usage"]["completion_tokens"] == 12
    assert answer["usage"]["prompt_tokens"] == 4, "each prompt counts once"
    chat = client.post("/v1/chat/completions", json={"messages": MESSAGES, "n": 2, "max_tokens": 3}).json()
    assert [(c["index"], c["message"]["content"]) for c in chat["choices"]] == [(0, "hel"), (1, "ifm")]


def test_streams_contain_n_choices_per_prompt(client: TestClient) -> None:
    events_sent = events(client, "/v1/completions", {"prompt": ["a", "b"], "n": 2, "max_tokens": 3})
    assert _joined(events_sent, 4, lambda choice: choice["text"]) == ["hel", "ifm", "hel", "ifm"]
    events_sent = events(client, "/v1/chat/completions", {"messages": MESSAGES, "n": 2, "max_tokens": 3})
    assert _joined(events_sent, 2, lambda choice: choice["delta"].get("content", "")) == ["hel", "ifm"]
    roles = [choice["index"] for event in events_sent for choice in event["choices"] if "role" in choice["delta"]]
    assert sorted(roles) == [0, 1], "each message begins with its role"


def test_continuous_usage_stats_are_in_every_event(client: TestClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events_sent = events(client, "/v1/completions", {"prompt": ["ab", "c"], "max_tokens": 2, "stream_options": options})
    counts = [
        (e["choices"][0]["index"], e["usage"]["prompt_tokens"], e["usage"]["completion_tokens"])
        for e in events_sent[:-1]
    ]
    assert sorted(counts) == [(0, 3, 1), (0, 3, 2), (1, 2, 1), (1, 2, 2)]
    assert (events_sent[-1]["usage"]["prompt_tokens"], events_sent[-1]["usage"]["completion_tokens"]) == (5, 4)


def test_flags_force_usage_and_omit_its_details(make_client: MakeClient) -> None:
    client = make_client(enable_force_include_usage=True, enable_prompt_tokens_details=False)
    *_, last = events(client, "/v1/completions", {"prompt": "a"})
    assert last["usage"] == {"prompt_tokens": 2, "completion_tokens": 11, "total_tokens": 13}


def test_completion_logprobs_have_openais_format(client: TestClient) -> None:
    body = {"prompt": "a", "max_tokens": 2, "logprobs": 1}
    reported = client.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    assert reported["tokens"] == ["h", "e"]
    assert reported["text_offset"] == [0, 1]
    assert reported["token_logprobs"] == pytest.approx([math.log(1 / 3)] * 2)
    assert reported["top_logprobs"][0] == pytest.approx({"h": math.log(1 / 3), "i": math.log(0.5)}), (
        "the token itself is included"
    )
    streamed = [event["choices"][0]["logprobs"] for event in events(client, "/v1/completions", body)]
    assert [entry["tokens"] for entry in streamed] == [["h"], ["e"]]
    assert [entry["text_offset"] for entry in streamed] == [[0], [1]]


def test_logprobs_0_returns_only_the_token(client: TestClient) -> None:
    body = {"prompt": "a", "max_tokens": 1, "logprobs": 0}
    reported = client.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    assert reported["top_logprobs"] == [pytest.approx({"h": math.log(1 / 3)})]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_repeats_the_prompt(client: TestClient, stream: bool) -> None:
    body = {"prompt": ["ab", "c"], "n": 2, "max_tokens": 2, "echo": True}
    if stream:
        texts = _joined(events(client, "/v1/completions", body), 4, lambda choice: choice["text"])
    else:
        texts = [choice["text"] for choice in client.post("/v1/completions", json=body).json()["choices"]]
    assert texts == ["abhe", "abif", "che", "cif"]


def test_echo_of_token_ids_is_their_text(client: TestClient) -> None:
    answer = client.post("/v1/completions", json={"prompt": [1, 99], "max_tokens": 1, "echo": True}).json()
    assert answer["choices"][0]["text"] == "^ch"


def test_echo_includes_logprobs_of_the_prompt(client: TestClient, engine: FakeEngine) -> None:
    body = {"prompt": "ab", "max_tokens": 1, "echo": True, "logprobs": 1}
    choice = client.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["text"] == "abh"
    assert choice["logprobs"]["tokens"] == ["^", "a", "b", "h"]
    assert choice["logprobs"]["token_logprobs"] == [None, *[pytest.approx(math.log(1 / 3))] * 3]
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert engine.requests_seen[0][1].prompt_logprobs == 1
    (event,) = events(client, "/v1/completions", body)
    assert event["choices"][0]["logprobs"] == choice["logprobs"]


@pytest.mark.parametrize("stream", [False, True])
def test_scoring_returns_only_the_prompt(client: TestClient, engine: FakeEngine, stream: bool) -> None:
    body = {"prompt": "ab", "max_tokens": 0, "echo": True, "logprobs": 1}
    if stream:
        (answer,) = events(client, "/v1/completions", body)
    else:
        answer = client.post("/v1/completions", json=body).json()
        assert answer["usage"]["completion_tokens"] == 0
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "length")
    assert choice["logprobs"]["tokens"] == ["^", "a", "b"]
    assert engine.requests_seen[0][1].max_tokens == 1


@pytest.mark.parametrize("more", [{}, {"truncate_prompt_tokens": -1}, {"truncate_prompt_tokens": 400}])
def test_a_scored_prompt_may_fill_the_context(client: TestClient, engine: FakeEngine, more: dict[str, Any]) -> None:
    limit = engine.info.max_model_len
    body = {"prompt": [99] * limit, "max_tokens": 0, "echo": True, "logprobs": 1, **more}
    assert client.post("/v1/completions", json=body).status_code == 200
    assert engine.requests_seen[0][1].only_scores
    assert len(engine.requests_seen[0][0]) == min(limit, 400 if more.get("truncate_prompt_tokens") == 400 else limit)
    for refused in ({**body, "max_tokens": 1}, {**body, "prompt": [99] * (limit + 1)}):
        if not more:
            answer = client.post("/v1/completions", json=refused)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_every_event_of_a_chat_has_usage(client: TestClient) -> None:
    options = {"continuous_usage_stats": True}
    body = {"messages": [*MESSAGES, {"role": "assistant", "content": "so"}], "echo": True, "stream_options": options}
    events_sent = events(client, "/v1/chat/completions", body)
    assert events_sent[0]["choices"][0]["delta"]["role"] == "assistant"
    assert all(event["usage"]["prompt_tokens"] > 0 for event in events_sent)


def test_prompt_logprobs_have_vllms_format(client: TestClient) -> None:
    for path, body in (("/v1/completions", {"prompt": "b"}), ("/v1/chat/completions", {"messages": MESSAGES})):
        answer = client.post(path, json={**body, "prompt_logprobs": 1}).json()
        reported = answer["prompt_logprobs"] if "chat" in path else answer["choices"][0]["prompt_logprobs"]
        assert reported[0] is None
        entry = reported[1]
        assert {(key, value["rank"], value["decoded_token"]) for key, value in entry.items()} >= (
            {("98", 2, "b"), ("99", 1, "c")} if "chat" not in path else set()
        )
        assert all(value["logprob"] < 0 for value in entry.values())


def test_chat_logprobs_have_openais_format(client: TestClient) -> None:
    body = {"messages": MESSAGES, "max_tokens": 2, "logprobs": True, "top_logprobs": 1}
    reported = client.post("/v1/chat/completions", json=body).json()["choices"][0]["logprobs"]
    assert [entry["token"] for entry in reported["content"]] == ["h", "e"]
    first = reported["content"][0]
    assert first["bytes"] == [ord("h")]
    assert first["logprob"] == pytest.approx(math.log(1 / 3))
    assert [(top["token"], top["logprob"]) for top in first["top_logprobs"]] == [("i", pytest.approx(math.log(0.5)))]
    streamed = [event["choices"][0]["logprobs"] for event in events(client, "/v1/chat/completions", body)[1:]]
    assert [entry["content"][0] for entry in streamed] == reported["content"]
    del body["top_logprobs"]
    plain = client.post("/v1/chat/completions", json=body).json()["choices"][0]["logprobs"]
    assert plain["content"][0]["top_logprobs"] == []


def test_logprobs_may_name_tokens_by_id(client: TestClient, make_client: MakeClient) -> None:
    body = {"prompt": "a", "max_tokens": 1, "logprobs": 1}
    requested = client.post("/v1/completions", json={**body, "return_tokens_as_token_ids": True})
    always = make_client(return_tokens_as_token_ids=True).post("/v1/completions", json=body)
    for answer in (requested, always):
        reported = answer.json()["choices"][0]["logprobs"]
        assert reported["tokens"] == ["token_id:104"]
        assert set(reported["top_logprobs"][0]) == {"token_id:104", "token_id:105"}


def test_a_logprob_of_minus_infinity_is_returned_as_minus_9999(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conftest, "fake_logprobs", lambda token, top: {token: Logprob(-math.inf, 3, "x")})
    body = {"prompt": "a", "max_tokens": 1, "logprobs": 0}
    reported = client.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    assert reported["token_logprobs"] == [-9999.0]


def test_tokenize_and_detokenize(client: TestClient) -> None:
    answer = client.post("/tokenize", json={"model": "tiny", "prompt": "ab", "return_token_strs": True}).json()
    assert answer == {"count": 3, "max_model_len": 64, "tokens": [1, 97, 98], "token_strs": ["^", "a", "b"]}
    bare = client.post("/tokenize", json={"prompt": "ab", "add_special_tokens": False}).json()
    assert bare["tokens"] == [97, 98]
    assert bare["token_strs"] is None
    chat = client.post("/tokenize", json={"messages": MESSAGES}).json()
    assert chat["tokens"] == [ord(character) for character in "<user>hi"]
    assert client.post("/detokenize", json={"tokens": [1, 97, 98]}).json() == {"prompt": "^ab"}


def _joined(events_sent: list[dict[str, Any]], num_choices: int, text: Callable[[dict[str, Any]], str]) -> list[str]:
    choices = [choice for event in events_sent for choice in event["choices"]]
    return ["".join(text(choice) for choice in choices if choice["index"] == index) for index in range(num_choices)]
