"""What is accepted, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from .conftest import FakeEngine

MESSAGES = [{"role": "user", "content": "hi"}]

NEUTRAL: dict[str, list[Any]] = {
    "n": [1],
    "presence_penalty": [0, 0.0],
    "frequency_penalty": [0],
    "logit_bias": [{}],
    "response_format": [{"type": "text"}],
    "service_tier": ["auto"],
    "min_p": [0.0],
    "repetition_penalty": [1, 1.0],
    "skip_special_tokens": [True],
    "use_beam_search": [False],
    "priority": [0],
    "echo": [False],
    "user": ["me"],
    "metadata": [{"a": "b"}],
    "store": [True, False],
}
ASKING: dict[str, Any] = {
    "n": 2,
    "presence_penalty": 0.5,
    "frequency_penalty": -1,
    "logit_bias": {"5": 1},
    "response_format": {"type": "json_object"},
    "service_tier": "priority",
    "min_p": 0.1,
    "min_tokens": 3,
    "repetition_penalty": 1.1,
    "skip_special_tokens": False,
    "use_beam_search": True,
    "priority": 1,
    "echo": True,
    "cache_salt": "x",
    "allowed_token_ids": [1],
}


@pytest.mark.parametrize(
    "field, value",
    [(field, value) for field, values in NEUTRAL.items() for value in [None, *values]]
    + [("best_of", 1), ("suffix", None), ("logprobs", None), ("add_special_tokens", True)],
)
def test_a_completion_field_that_asks_for_nothing(client: TestClient, field: str, value: Any) -> None:
    response = client.post("/v1/completions", json={"prompt": "a", field: value})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    "field, value",
    [(field, value) for field, values in NEUTRAL.items() for value in [None, *values]]
    + [
        ("logprobs", False),
        ("top_logprobs", 0),
        ("tools", []),
        ("tool_choice", "none"),
        ("tool_choice", "auto"),
        ("parallel_tool_calls", True),
        ("parallel_tool_calls", False),
        ("modalities", ["text"]),
        ("max_completion_tokens", 5),
    ],
)
def test_a_chat_field_that_asks_for_nothing(client: TestClient, field: str, value: Any) -> None:
    response = client.post("/v1/chat/completions", json={"messages": MESSAGES, field: value})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("field, value", [*ASKING.items(), ("best_of", 2), ("logprobs", 0), ("suffix", "x")])
def test_a_completion_field_we_have_not_built(client: TestClient, field: str, value: Any) -> None:
    _assert_refused(client, "/v1/completions", {"prompt": "a", field: value}, field)


@pytest.mark.parametrize(
    "field, value",
    [
        *ASKING.items(),
        ("logprobs", True),
        ("top_logprobs", 1),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("modalities", ["text", "audio"]),
        ("reasoning_effort", "high"),
        ("chat_template", "{{ 1 }}"),
        ("continue_final_message", True),
    ],
)
def test_a_chat_field_we_have_not_built(client: TestClient, field: str, value: Any) -> None:
    _assert_refused(client, "/v1/chat/completions", {"messages": MESSAGES, field: value}, field)


@pytest.mark.parametrize(
    "field, value",
    [
        ("unheard_of", 1),
        ("guided_json", {}),
        ("temperature", "0.5"),
        ("temperature", True),
        ("temperature", -1),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("top_k", 10**30),
        ("seed", 2**63),
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_tokens", 10**30),
        ("stop", 5),
        ("stop", ["a"] * 17),
        ("stop", ""),
        ("stop_token_ids", 5),
        ("ignore_eos", "yes"),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("prompt", None),
        ("prompt", []),
        ("prompt", 5),
        ("prompt", ["a", 5]),
        ("prompt", [[1], "a"]),
        ("prompt", [[]]),
        ("prompt", ["a"] * 1025),
        ("model", 5),
    ],
)
def test_a_wrong_value_is_refused_by_name(client: TestClient, field: str, value: Any) -> None:
    _assert_refused(client, "/v1/completions", {"prompt": "a", field: value}, field)


@pytest.mark.parametrize("value", ["a", 1.5, True, 2**70])
def test_a_wrong_element_is_refused_by_path(client: TestClient, value: Any) -> None:
    _assert_refused(client, "/v1/completions", {"prompt": "a", "stop_token_ids": [1, value]}, "stop_token_ids[1]")


@pytest.mark.parametrize(
    "messages, param",
    [
        ([], "messages"),
        (None, "messages"),
        ("hi", "messages"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([*MESSAGES, {"role": "tool", "content": "x"}], "messages[1].role"),
        ([{"role": "user", "content": "x", "size": 1}], "messages[0].size"),
        ([{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}], "messages[0].tool_calls"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}],
            "messages[0].content",
        ),
    ],
)
def test_wrong_messages_are_refused_by_path(client: TestClient, messages: Any, param: str) -> None:
    _assert_refused(client, "/v1/chat/completions", {"messages": messages}, param)


def test_two_different_limits_for_a_chat_are_refused(client: TestClient) -> None:
    body = {"messages": MESSAGES, "max_tokens": 3, "max_completion_tokens": 4}
    _assert_refused(client, "/v1/chat/completions", body, "max_tokens")


def test_parameters_reach_the_engine(client: TestClient, engine: FakeEngine) -> None:
    client.post(
        "/v1/completions",
        json={
            "prompt": "ab",
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 7,
            "seed": 42,
            "max_tokens": 5,
            "stop": ["x", "y"],
            "stop_token_ids": [3],
            "ignore_eos": True,
            "add_special_tokens": False,
        },
    )
    prompt, params = engine.asked[0]
    assert prompt == [97, 98]
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.5, 0.9, 7, 42)
    assert (params.max_tokens, params.stop, params.stop_token_ids) == (5, ("x", "y"), (3,))
    assert params.ignore_eos


def test_defaults_are_openais(client: TestClient, engine: FakeEngine) -> None:
    client.post("/v1/completions", json={"prompt": "a", "temperature": None, "stop": None, "top_p": None})
    client.post("/v1/completions", json={"prompt": "a" * 58})
    client.post("/v1/chat/completions", json={"messages": MESSAGES})
    completion, nearly_full, chat = (params for _, params in engine.asked)
    assert (completion.temperature, completion.top_p, completion.top_k, completion.stop) == (1.0, 1.0, 0, ())
    assert completion.max_tokens == 16
    assert nearly_full.max_tokens == 5, "the default bends to the room there is"
    assert chat.max_tokens is None, "to the end of the context"


def test_a_chat_reaches_the_template_as_text(client: TestClient, engine: FakeEngine) -> None:
    sent_back = {"role": "assistant", "content": "b", "refusal": None, "annotations": None, "tool_calls": None}
    parts = [{"type": "text", "text": "c"}, {"type": "text", "text": "d"}]
    messages = [{"role": "developer", "content": "a"}, sent_back, {"role": "user", "content": parts}]
    client.post("/v1/chat/completions", json={"messages": messages})
    assert "".join(map(chr, engine.asked[0][0])) == "<system>a<assistant>b<user>c\nd"


def _assert_refused(client: TestClient, path: str, body: dict[str, Any], param: str) -> None:
    response = client.post(path, json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert error["message"]
