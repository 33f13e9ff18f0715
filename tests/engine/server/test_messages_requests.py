"""Bodies of /v1/messages: they result in the same prompt as the same chat; unsupported fields are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from stoker_common.errors import EngineDeadError, RequestError
from stoker_engine.server.anthropic.request import MessagesRequest
from stoker_engine.server.openai.chat_request import ChatCompletionRequest
from stoker_engine.server.unavailable import UnavailableError

from ...support.work import work
from .conftest import FakeEngine, MakeClient, MakeService
from .test_messages import HELLO, WEATHER, ScriptedEngine

JSON_SCHEMA: Any = {"type": "json_schema", "schema": {"type": "object"}}


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def client(make_client: MakeClient) -> TestClient:
    return make_client(tool_call_parser="hermes")


def rendered(client: TestClient, engine: FakeEngine, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the chat template."""
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return engine.tokenizer.rendered


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def text(words: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **fields}


def used(name: str, id: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": id, "name": name, "input": arguments}


def result(id: str, content: Any = "", **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": id, "content": content, **fields}


def called(name: str, id: str, arguments: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


#: Conversations in Anthropic's and in OpenAI's format.
SAME: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"messages": [user("hi")]}, {"messages": [user("hi")]}),
    ({"messages": [user([text("a"), text(""), text("b")])]}, {"messages": [user("a\nb")]}),
    ({"messages": [user("a"), user([text("b")])]}, {"messages": [user("a\nb")]}),
    ({"messages": [user("")]}, {"messages": [user("")]}),
    (
        {"system": [text("s", cache_control={"type": "ephemeral", "ttl": "1h"}), text("t")], "messages": [user("hi")]},
        {"messages": [{"role": "system", "content": "s\nt"}, user("hi")]},
    ),
    (
        {
            "tools": [{**WEATHER, "type": "custom", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                user("hi"),
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": "x"},
                        {"type": "redacted_thinking", "data": "eA=="},
                        text("look:", citations=None),
                        used("weather", "t1", city="Oslo"),
                        {**used("weather", "t2"), "caller": {"type": "direct"}},
                    ],
                },
                user([result("t1", [text("rain"), text("wind")]), result("t2", is_error=True), text("so?")]),
            ],
        },
        {
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": "weather",
                        "description": WEATHER["description"],
                        "parameters": WEATHER["input_schema"],
                    },
                }
            ],
            "messages": [
                user("hi"),
                {
                    "role": "assistant",
                    "content": "look:",
                    "reasoning": "hm",
                    "tool_calls": [called("weather", "t1", '{"city": "Oslo"}'), called("weather", "t2", "{}")],
                },
                {"role": "tool", "tool_call_id": "t1", "content": "rain\nwind"},
                {"role": "tool", "tool_call_id": "t2", "content": "Error"},
                user("so?"),
            ],
        },
    ),
    (
        {"messages": [user("hi"), {"role": "assistant", "content": "The sun is ("}]},
        {"messages": [user("hi"), {"role": "assistant", "content": "The sun is ("}], "continue_final_message": True},
    ),
    (
        {"messages": [user("hi")], "thinking": {"type": "disabled"}, "chat_template_kwargs": {"a": 1}},
        {"messages": [user("hi")], "chat_template_kwargs": {"enable_thinking": False, "thinking": False, "a": 1}},
    ),
    (
        {"messages": [user("hi")], "thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"messages": [user("hi")], "chat_template_kwargs": {"enable_thinking": True, "thinking": True}},
    ),
    (
        {"messages": [user("hi")], "output_config": {"effort": "low"}},
        {"messages": [user("hi")], "reasoning_effort": "low"},
    ),
]


@pytest.mark.parametrize(("anthropic", "openai"), SAME)
def test_conversations_are_rendered_like_the_same_chat(
    client: TestClient, engine: FakeEngine, anthropic: dict[str, Any], openai: dict[str, Any]
) -> None:
    counted = rendered(client, engine, "/v1/messages", {"model": "tiny", "max_tokens": 2000, **anthropic})
    assert counted == rendered(client, engine, "/v1/chat/completions", openai)
    assert engine.requests_seen[0][0] == engine.requests_seen[1][0]


@pytest.mark.parametrize("anywhere", [True, False])
def test_later_system_messages_move_first_if_the_template_requires_it(
    client: TestClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, anywhere: bool
) -> None:
    chat_text = engine.tokenizer.chat_text

    async def first_only(messages: list[dict[str, Any]], **kwargs: Any) -> str:
        if any(message["role"] == "system" for message in messages[1:]):
            raise RequestError("the system message must come first", "messages")
        return await chat_text(messages, **kwargs)

    if not anywhere:
        monkeypatch.setattr(engine.tokenizer, "chat_text", first_only)
    body = {**HELLO, "system": "one", "messages": [user("a"), {"role": "system", "content": "two"}, user("b")]}
    for _ in range(2):
        messages = rendered(client, engine, "/v1/messages", body)["messages"]
        roles_and_texts = [(message["role"], message["content"]) for message in messages]
        if anywhere:
            assert roles_and_texts == [("system", "one"), ("user", "a"), ("system", "two"), ("user", "b")]
        else:
            assert roles_and_texts == [("system", "one\ntwo"), ("user", "a\nb")]


def test_requests_of_coding_agents_are_accepted(client: TestClient, engine: FakeEngine) -> None:
    body = {
        "model": "tiny",
        "max_tokens": 32_000,
        "stream": True,
        "system": [
            text("x-anthropic-billing-header: cc_version=2.1; cch=1f3a;"),
            text("You are an agent.", cache_control={"type": "ephemeral", "scope": "global"}),
            text("Be careful.", cache_control={"type": "ephemeral", "ttl": "1h"}),
        ],
        "messages": [
            user([text("<system-reminder>x</system-reminder>"), text("hi", cache_control={"type": "ephemeral"})])
        ],
        "tools": [{**WEATHER, "name": f"mcp__server__tool-{n}", "eager_input_streaming": True} for n in range(50)],
        "tool_choice": {"type": "auto"},
        "metadata": {"user_id": '{"device_id":"a","session_id":"b"}'},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
        "service_tier": "auto",
        "temperature": 1,
    }
    headers = {
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
    }
    response = client.post("/v1/messages?beta=true", json=body, headers=headers)
    assert response.status_code == 200, response.text
    assert response.headers["request-id"]
    assert response.text.endswith('data: {"type":"message_stop"}\n\n')
    system, roles_and_texts = engine.tokenizer.rendered["messages"]
    assert system["content"] == "You are an agent.\nBe careful."
    assert roles_and_texts["content"].endswith("</system-reminder>\nhi")


IMAGE: Any = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
    ({"messages": [user([])]}, "messages[0].content"),
    ({"messages": [user(5)]}, "messages[0].content"),
    ({"messages": [user([text("a"), IMAGE])]}, "image"),
    ({"messages": [user([{"type": "document", "source": {}}])]}, "document"),
    ({"messages": [user([result("t", [IMAGE])])]}, "image"),
    ({"messages": [user([{"type": "text"}])]}, "messages[0].content[0].text"),
    ({"messages": [user([used("weather", "t")])]}, "tool_use"),
    ({"messages": [user("a"), {"role": "assistant", "content": [result("t")]}, user("b")]}, "tool_result"),
    ({"messages": [user("a"), {"role": "assistant", "content": [used("weather", "t")]}]}, "tool_result must follow"),
    (
        {
            "messages": [user("a"), {"role": "assistant", "content": "b"}],
            "thinking": {"type": "enabled", "budget_tokens": 1024},
        },
        "thinking",
    ),
    ({"system": [IMAGE]}, "image"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": None}, "max_tokens"),
    ({"model": None}, "model"),
    ({"temperature": -1}, "temperature"),
    ({"top_k": "5"}, "top_k"),
    ({"stop_sequences": ["a"] * 17}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "bash_20250124"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
    ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
    ({"tools": [{"name": "a", "input_schema": {"type": "array"}}]}, "input_schema"),
    ({"tools": [WEATHER, WEATHER]}, "weather"),
    ({"tools": [{**WEATHER, "defer_loading": True}]}, "defer_loading"),
    ({"tools": [{**WEATHER, "input_examples": [{"city": "Oslo"}]}]}, "input_examples"),
    ({"tool_choice": {"type": "auto"}}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "all"}}, "tool_choice"),
    ({"thinking": {"type": "enabled"}}, "thinking"),
    ({"thinking": {"type": "enabled", "budget_tokens": 100}}, "1024"),
    ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "less than max_tokens"),
    ({"thinking": {"type": "between_tools"}}, "thinking"),
    ({"output_config": {"effort": "huge"}}, "effort"),
    ({"output_config": {"format": JSON_SCHEMA}, "output_format": JSON_SCHEMA}, "output_format"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
    ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
    ({"container": "c"}, "container"),
    ({"speed": "fast"}, "speed"),
    ({"vllm_xargs": {"a": 1}}, "vllm_xargs"),
    ({"n": 2}, "'n'"),
]


def test_refusals_name_the_field(client: TestClient, engine: FakeEngine) -> None:
    for fields, named in REFUSED:
        for stream in (False, True):
            response = client.post("/v1/messages", json={**HELLO, "stream": stream, **fields})
            assert named in error_of(response, 400, "invalid_request_error"), fields
    assert not engine.requests_seen


def test_threads_are_refused_with_anthropics_error_code(client: TestClient) -> None:
    response = client.post("/v1/messages", json={**HELLO, "thread": {"type": "create"}})
    assert "thread" in error_of(response, 400, "invalid_request_error")
    assert response.json()["error"]["details"] == {"error_code": "thread_unsupported_request"}


def error_of(response: Any, status: int, kind: str) -> str:
    """Return the message of an error; check its format."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert body["error"]["type"] == kind
    assert set(body["error"]) <= {"type", "message", "details"}
    assert "Traceback" not in response.text
    assert response.headers["request-id"] == body["request_id"]
    message: str = body["error"]["message"]
    return message


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_errors_have_anthropics_types(make_client: MakeClient, make_service: MakeService, path: str) -> None:
    keys = make_client(api_key=("k",))
    response = keys.post(path, json=HELLO)
    error_of(response, 401, "authentication_error")
    assert response.headers["www-authenticate"] == "Bearer"
    client = make_client(max_request_bytes=1000)
    body = {name: value for name, value in HELLO.items() if path == "/v1/messages" or name != "max_tokens"}
    assert "claude" in error_of(client.post(path, json={**body, "model": "claude"}), 404, "not_found_error")
    error_of(client.post(path, json={**body, "system": "a" * 1000}), 413, "request_too_large")
    error_of(
        client.post(path, content=b"{", headers={"content-type": "application/json"}), 400, "invalid_request_error"
    )
    response = client.get(path)
    error_of(response, 405, "invalid_request_error")
    assert response.headers["allow"] == "POST"
    error_of(client.post(f"{path}/batches", json=body), 404, "not_found_error")
    assert set(client.get("/v1/messagesx").json()) == {"error"}, "other paths have OpenAI's format"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("mistake", "status", "kind"),
    [
        (UnavailableError("not now"), 503, "overloaded_error"),
        (EngineDeadError("the engine has stopped"), 500, "api_error"),
        (ZeroDivisionError("secret"), 500, "api_error"),
        (RequestError("too many", "max_tokens"), 400, "invalid_request_error"),
    ],
)
def test_engine_errors_have_anthropics_types(
    client: TestClient, engine: FakeEngine, mistake: Exception, status: int, kind: str, stream: bool
) -> None:
    engine.error = mistake
    response = client.post("/v1/messages", json={**HELLO, "stream": stream})
    assert "secret" not in error_of(response, status, kind)
    assert ("retry-after" in response.headers) == (status == 503)


def test_a_full_queue_is_429_with_retry_after(make_client: MakeClient, engine: FakeEngine) -> None:
    client = make_client(max_num_queued_reqs=0)
    response = client.post("/v1/messages", json=HELLO)
    error_of(response, 429, "rate_limit_error")
    assert response.headers["retry-after"]


def test_many_messages_cost_no_more_work_than_in_a_chat() -> None:
    """The event loop serves no other request meanwhile."""
    body = {**HELLO, "messages": [{"role": "user", "content": "a"}] * 5000}
    counted, chat = (
        work(lambda kind=kind: kind.model_validate(body)) for kind in (MessagesRequest, ChatCompletionRequest)
    )  # type: ignore[misc]
    assert counted < 2 * chat, "a string of a message needs no blocks"
    assert {type(message.content) for message in MessagesRequest.model_validate(body).messages} == {str}
