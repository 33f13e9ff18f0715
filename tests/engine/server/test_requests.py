"""Accepted requests, and refused ones with the name of the field."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from starlette.testclient import TestClient

from stoker_common.errors import RequestError
from stoker_engine.core.sampling_params import BeamSearchParams

from .conftest import FakeEngine, MakeClient

MESSAGES = [{"role": "user", "content": "hi"}]
NO_OBJECTS = ['{"city": "Os', "{", "[1", "[1]", '"x"', "5", "null", '{"x": NaN}', "no JSON", " "]
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "tells it", "parameters": {"type": "object", "properties": {}}},
}

NEUTRAL: dict[str, list[Any]] = {
    "response_format": [{"type": "text"}],
    "service_tier": ["auto"],
    "truncation_side": ["left"],
    "use_beam_search": [False],
    "length_penalty": [1, 1.0],
    "early_stopping": [False],
    "priority": [0],
    "echo": [False],
    "user": ["me"],
    "metadata": [{"a": "b"}],
    "store": [True, False],
}
ASKING: dict[str, Any] = {
    "service_tier": "priority",
    "logprob_token_ids": [1],
    "length_penalty": 2,
    "early_stopping": True,
    "priority": 1,
    "vllm_xargs": {"a": 1},
}
#: Sampling fields of a body, equal in both APIs.
SAMPLING: dict[str, Any] = {
    "n": 2,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 7,
    "min_p": 0.1,
    "presence_penalty": 0.5,
    "frequency_penalty": -1,
    "repetition_penalty": 1.1,
    "seed": 42,
    "stop": ["x", "y"],
    "stop_token_ids": [3],
    "ignore_eos": True,
    "min_tokens": 3,
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "bad_words": ["no"],
    "allowed_token_ids": [104, 105],
    "prompt_logprobs": 2,
}


@pytest.mark.parametrize(
    "field, value",
    [(field, value) for field, values in NEUTRAL.items() for value in [None, *values]]
    + [("best_of", 1), ("suffix", None), ("logprobs", None), ("add_special_tokens", True)],
)
def test_neutral_completion_fields_are_accepted(client: TestClient, field: str, value: Any) -> None:
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
def test_neutral_chat_fields_are_accepted(client: TestClient, field: str, value: Any) -> None:
    response = client.post("/v1/chat/completions", json={"messages": MESSAGES, field: value})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("field, value", [*ASKING.items(), ("best_of", 2), ("prompt_embeds", "x"), ("suffix", "x")])
def test_unsupported_completion_fields_are_refused(client: TestClient, field: str, value: Any) -> None:
    _assert_refused(client, "/v1/completions", {"prompt": "a", field: value}, field)


@pytest.mark.parametrize(
    "field, value",
    [
        *ASKING.items(),
        ("top_logprobs", 1),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("modalities", ["text", "audio"]),
        ("reasoning_effort", "very"),
        ("chat_template", "{{ 1 }}"),
        ("chat_template_kwargs", {"messages": []}),
        ("echo", "yes"),
        ("truncation_side", "top"),
    ],
)
def test_unsupported_chat_fields_are_refused(client: TestClient, field: str, value: Any) -> None:
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
        ("n", 0),
        ("n", 129),
        ("min_p", 1.5),
        ("presence_penalty", 3),
        ("repetition_penalty", 0),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", [1]),
        ("logit_bias", {str(token): 1 for token in range(301)}),
        ("bad_words", [""]),
        ("bad_words", ["a"] * 257),
        ("bad_words", ["a" * 4097]),
        ("bad_words", ["a" * 100] * 164),
        ("allowed_token_ids", []),
        ("min_tokens", 17),
        ("logprobs", -2),
        ("logprobs", True),
        ("prompt_logprobs", -2),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
        ("cache_salt", ""),
        ("cache_salt", "a/b"),
        ("cache_salt", "a" * 129),
        ("request_id", "two words"),
        ("request_id", "a" * 129),
        ("max_tokens", 1.5),
        ("max_tokens", 10**30),
        ("stop", 5),
        ("stop", ["a"] * 17),
        ("stop", ""),
        ("stop", ["a" * 4097]),
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
        ([*MESSAGES, {"role": "function", "content": "x"}], "messages[1].role"),
        ([{"role": "user", "content": "x", "tool_calls": [CALL]}], "messages[0].tool_calls"),
        ([{"role": "user", "content": "x", "tool_call_id": "1"}], "messages[0].tool_call_id"),
        ([{"role": "user", "content": "x", "size": 1}], "messages[0].size"),
        ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], "messages[0].tool_calls[0].function"),
        ([{"role": "assistant", "tool_calls": []}], "messages[0].content"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}],
            "messages[0].tool_calls[0].function.arguments.str",
        ),
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


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_parameters_reach_the_engine(client: TestClient, engine: FakeEngine, path: str) -> None:
    subject = {"messages": MESSAGES} if "chat" in path else {"prompt": "ab", "add_special_tokens": False}
    body = {**subject, **SAMPLING, "max_tokens": 5, "logit_bias": {"104": -100, "7": 1.5}}
    assert client.post(path, json=body).status_code == 200
    prompt, params = engine.requests_seen[0]
    assert prompt == [ord(character) for character in ("<user>hi" if "chat" in path else "ab")]
    for name, value in SAMPLING.items():
        assert getattr(params, name) == (tuple(value) if isinstance(value, list) else value), name
    assert params.max_tokens == 5
    assert params.logit_bias == {104: -100, 7: 1.5}


def test_the_models_sampling_defaults_apply_to_omitted_fields(make_client: MakeClient, engine: FakeEngine) -> None:
    engine.info = replace(engine.info, sampling_defaults={"temperature": 0.6, "top_k": 20, "max_tokens": 9})
    client = make_client()
    client.post("/v1/chat/completions", json={"messages": MESSAGES, "top_k": 3, "temperature": None})
    client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x" * 53}]})
    client.post("/v1/completions", json={"prompt": "a", "temperature": 0})
    chat, nearly_full, completion = (params for _, params in engine.requests_seen)
    assert (chat.temperature, chat.top_k, chat.max_tokens) == (0.6, 3, 9)
    assert nearly_full.max_tokens == 5, "a recommended length is reduced to the remaining context"
    assert (completion.temperature, completion.top_k, completion.max_tokens) == (0, 20, 16)


def test_beam_search_fields_reach_the_engine(client: TestClient, engine: FakeEngine) -> None:
    beams = {"use_beam_search": True, "n": 3, "length_penalty": 0.5, "early_stopping": "never", "temperature": 0}
    answer = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 4, "stop_token_ids": [7], **beams})
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["choices"]) == 3
    assert client.post("/v1/chat/completions", json={"messages": MESSAGES, **beams}).status_code == 200
    assert engine.requests_seen[0][1] == BeamSearchParams(
        beam_width=3, max_tokens=4, length_penalty=0.5, early_stopping="never", stop_token_ids=(7,)
    )


@pytest.mark.parametrize(
    "field, value",
    [
        ("temperature", 0.5),
        ("top_p", 0.5),
        ("min_p", 0.1),
        ("presence_penalty", 1),
        ("logit_bias", {"5": 1}),
        ("allowed_token_ids", [5]),
        ("bad_words", ["x"]),
        ("min_tokens", 2),
        ("stop", "x"),
        ("logprobs", 1),
        ("prompt_logprobs", 1),
        ("stream", True),
        ("length_penalty", 11),
    ],
)
def test_fields_incompatible_with_beam_search_are_refused(client: TestClient, field: str, value: Any) -> None:
    _assert_refused(client, "/v1/completions", {"prompt": "a", "use_beam_search": True, "n": 2, field: value}, field)


def test_truncation_keeps_the_requested_side_of_the_prompt(client: TestClient, engine: FakeEngine) -> None:
    answer = client.post("/v1/completions", json={"prompt": "abcdef", "truncate_prompt_tokens": 2, "echo": True})
    assert answer.json()["choices"][0]["text"] == "efhello world"
    assert answer.json()["usage"]["prompt_tokens"] == 2
    client.post("/v1/completions", json={"prompt": "x" * 100, "truncate_prompt_tokens": -1, "max_tokens": 4})
    client.post("/v1/chat/completions", json={"messages": MESSAGES, "truncate_prompt_tokens": 3})
    assert [len(prompt) for prompt, _ in engine.requests_seen] == [2, 60, 3]
    for path, prompt_fields in (
        ("/v1/completions", {"prompt": "abcdef"}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
    ):
        for side in ("left", "right"):
            client.post(path, json={**prompt_fields, "truncate_prompt_tokens": 3, "truncation_side": side})
    cut = ["".join(map(chr, prompt)) for prompt, _ in engine.requests_seen[3:]]
    assert cut == ["def", "\x01ab", ">hi", "<us"]


def test_priority_and_cache_salt_reach_the_engine(make_client: MakeClient, engine: FakeEngine) -> None:
    client = make_client(engine_args={"scheduling_policy": "priority"})
    client.post("/v1/completions", json={"prompt": "a", "priority": -3, "cache_salt": "s"})
    client.post("/v1/completions", json={"prompt": "a"})
    assert engine.options == [{"priority": -3, "cache_salt": "s"}, {"priority": 0, "cache_salt": ""}]


def test_prompt_logprobs_are_refused_in_streams(client: TestClient) -> None:
    body = {"prompt": "a", "prompt_logprobs": 1, "stream": True}
    _assert_refused(client, "/v1/completions", body, "prompt_logprobs")


@pytest.mark.parametrize("token", [-1, 1_114_112, 2**70])
@pytest.mark.parametrize("echo", [False, True])
def test_unknown_tokens_are_refused(make_client: MakeClient, token: int, echo: bool) -> None:
    client = make_client(enable_log_requests=True)
    _assert_refused(client, "/v1/completions", {"prompt": [[1], [token]], "echo": echo}, "prompt")


def test_too_many_choices_are_refused(client: TestClient) -> None:
    _assert_refused(client, "/v1/completions", {"prompt": ["a"] * 100, "n": 11}, "prompt")


def test_errors_name_the_chats_own_fields(client: TestClient, engine: FakeEngine) -> None:
    engine.error = RequestError("at most 20", "logprobs")
    body = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 30}
    _assert_refused(client, "/v1/chat/completions", body, "top_logprobs")


def test_defaults_are_openais(client: TestClient, engine: FakeEngine) -> None:
    client.post("/v1/completions", json={"prompt": "a", "temperature": None, "stop": None, "top_p": None})
    client.post("/v1/completions", json={"prompt": "a" * 58})
    client.post("/v1/chat/completions", json={"messages": MESSAGES})
    completion, nearly_full, chat = (params for _, params in engine.requests_seen)
    assert (completion.temperature, completion.top_p, completion.top_k, completion.stop) == (1.0, 1.0, 0, ())
    assert completion.max_tokens == 16
    assert nearly_full.max_tokens == 5, "the default is reduced to the remaining context"
    assert chat.max_tokens is None, "to the end of the context"


def test_a_chat_reaches_the_template_as_text(client: TestClient, engine: FakeEngine) -> None:
    sent_back = {"role": "assistant", "content": "b", "refusal": None, "annotations": None, "tool_calls": None}
    parts = [{"type": "text", "text": "c"}, {"type": "text", "text": "d"}]
    messages = [{"role": "developer", "content": "a"}, sent_back, {"role": "user", "content": parts}]
    client.post("/v1/chat/completions", json={"messages": messages})
    assert "".join(map(chr, engine.requests_seen[0][0])) == "<system>a<assistant>b<user>c\nd"


def test_tools_and_their_messages_reach_the_template(make_client: MakeClient, engine: FakeEngine) -> None:
    client = make_client(tool_call_parser="hermes")
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "1", "content": "5 °C"},
    ]
    for choice in ({}, {"tool_choice": "auto"}, {"tool_choice": "none"}):
        response = client.post("/v1/chat/completions", json={"messages": messages, "tools": [TOOL], **choice})
        assert response.status_code == 200, response.text
        rendered = engine.tokenizer.rendered
        assert rendered["tools"] == [TOOL]
    _, call_message, answered = rendered["messages"]
    assert call_message["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Oslo"}}
    assert (call_message["content"], call_message["reasoning"]) == ("", "hm")
    assert answered == {"role": "tool", "content": "5 °C", "tool_call_id": "1"}


@pytest.mark.parametrize("arguments", NO_OBJECTS)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_conversations_with_malformed_calls_are_served(
    client: TestClient, engine: FakeEngine, path: str, arguments: str
) -> None:
    if path == "/v1/responses":
        call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": arguments}
        body: dict[str, Any] = {"input": [{"role": "user", "content": "hi"}, call, {"role": "user", "content": "ho"}]}
    else:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        body = {"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [call]}, *MESSAGES]}
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    [rendered_call] = engine.tokenizer.rendered["messages"][1]["tool_calls"]
    assert rendered_call["function"] == {"name": "f", "arguments": arguments}


def test_a_flag_omits_tools_if_tool_choice_is_none(make_client: MakeClient, engine: FakeEngine) -> None:
    client = make_client(exclude_tools_when_tool_choice_none=True, tool_call_parser="hermes")
    client.post("/v1/chat/completions", json={"messages": MESSAGES, "tools": [TOOL], "tool_choice": "none"})
    assert engine.tokenizer.rendered["tools"] is None
    client.post("/v1/chat/completions", json={"messages": MESSAGES, "tools": [TOOL], "tool_choice": "auto"})
    assert engine.tokenizer.rendered["tools"] == [TOOL]


def test_chat_fields_reach_the_template(make_client: MakeClient, engine: FakeEngine) -> None:
    client = make_client(
        default_chat_template_kwargs='{"enable_thinking": false, "style": 1}', trust_request_chat_template=True
    )

    def rendered(**fields: Any) -> dict[str, Any]:
        response = client.post("/v1/chat/completions", json={"messages": MESSAGES, **fields})
        assert response.status_code == 200, response.text
        return engine.tokenizer.rendered

    plain = rendered()
    assert plain["chat_template_kwargs"] == {"enable_thinking": False, "style": 1}
    assert (plain["add_generation_prompt"], plain["continue_final_message"]) == (True, False)
    assert (plain["chat_template"], plain["documents"], plain["tools"]) == (None, None, None)
    assert rendered(chat_template_kwargs={"style": 2})["chat_template_kwargs"]["style"] == 2
    continued = rendered(continue_final_message=True)
    assert (continued["add_generation_prompt"], continued["continue_final_message"]) == (False, True)
    assert rendered(add_generation_prompt=False)["add_generation_prompt"] is False
    assert rendered(chat_template="{{ 1 }}")["chat_template"] == "{{ 1 }}"
    documents = [{"title": "a", "text": "b"}]
    assert rendered(documents=documents)["documents"] == documents
    thinking = {"enable_thinking": True, "style": 1, "reasoning_effort": "low"}
    assert rendered(reasoning_effort="low")["chat_template_kwargs"] == thinking
    assert rendered(reasoning_effort="none")["chat_template_kwargs"]["enable_thinking"] is False
    rendering = rendered(
        reasoning_effort="high", chat_template_kwargs={"enable_thinking": False, "reasoning_effort": 1}
    )
    assert rendering["chat_template_kwargs"] == {"enable_thinking": False, "style": 1, "reasoning_effort": "high"}
    rendered(add_special_tokens=True)
    assert engine.requests_seen[-1][0][0] == 1
    body = {"messages": MESSAGES, "continue_final_message": True, "add_generation_prompt": True}
    _assert_refused(client, "/v1/chat/completions", body, "continue_final_message")


@pytest.mark.parametrize(
    "body, param",
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": MESSAGES}, "prompt"),
        ({"prompt": "a", "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"prompt": "a", "unheard_of": 1}, "unheard_of"),
        ({"messages": []}, "messages"),
    ],
)
def test_invalid_tokenize_requests_are_refused(client: TestClient, body: dict[str, Any], param: str) -> None:
    _assert_refused(client, "/tokenize", body, param)


@pytest.mark.parametrize("tokens", [[-1], [2**63], ["a"], [True], 5, [1_114_112]])
def test_invalid_detokenize_requests_are_refused(client: TestClient, tokens: Any) -> None:
    response = client.post("/detokenize", json={"tokens": tokens})
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("tokens")


def _assert_refused(client: TestClient, path: str, body: dict[str, Any], param: str) -> None:
    response = client.post(path, json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert error["message"]
