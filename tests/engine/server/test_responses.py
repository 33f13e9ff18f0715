"""/v1/responses: accepted bodies, their conversion to chats, and what is stored. The engine is faked."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, replace
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from stoker_engine.server.conversation.messages import Message
from stoker_engine.server.openai.messages import Message as ChatMessage
from stoker_engine.server.responses.items import from_json, messages, to_json
from stoker_engine.server.responses.store import ResponseStore

from .conftest import FakeEngine, MakeClient
from .test_errors import error_of

PATH = "/v1/responses"


@pytest.fixture
def engine() -> FakeEngine:
    engine = FakeEngine()
    engine.info = replace(engine.info, max_model_len=4096)
    return engine


def ask(client: TestClient, **body: Any) -> dict[str, Any]:
    """Return the response to a valid request."""
    response = client.post(PATH, json={"input": "hi", **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "2"}
THOUGHT = {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
ASSISTANT_MESSAGE = {
    "type": "message",
    "id": "m",
    "status": "completed",
    "role": "assistant",
    "content": [
        {"type": "output_text", "text": "well, ", "annotations": [], "logprobs": []},
        {"type": "refusal", "refusal": "no"},
    ],
}


def call_in_chat(call_id: str = "c1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}


def test_the_response_repeats_the_fields_of_the_request(make_client: MakeClient) -> None:
    client = make_client(tool_call_parser="hermes")
    tool = {"type": "function", "name": "f", "parameters": {"type": "object", "default": None}, "strict": True}
    answer = ask(
        client,
        instructions="be brief",
        max_output_tokens=100,
        temperature=0.5,
        top_p=0.9,
        tools=[tool],
        tool_choice="auto",
        parallel_tool_calls=False,
        truncation="auto",
        metadata={"a": "b"},
        user="me",
        max_tool_calls=3,
    )
    assert answer["object"] == "response"
    assert answer["status"] == "completed"
    assert answer["output"][0]["content"][0]["text"] == "hello world"
    assert (answer["instructions"], answer["max_output_tokens"], answer["max_tool_calls"]) == ("be brief", 100, 3)
    assert (answer["temperature"], answer["top_p"], answer["truncation"]) == (0.5, 0.9, "auto")
    assert answer["tools"] == [{**tool, "description": None}]
    assert answer["parallel_tool_calls"] is False
    assert (answer["metadata"], answer["user"]) == ({"a": "b"}, "me")
    assert answer["text"] == {"format": {"type": "text"}}
    assert answer["error"] is answer["incomplete_details"] is answer["previous_response_id"] is None
    usage = answer["usage"]
    assert usage["input_tokens"] + usage["output_tokens"] == usage["total_tokens"]
    assert usage["input_tokens_details"]["cached_tokens"] == 2
    assert usage["output_tokens"] == len("hello world")


def test_a_schema_is_converted_unchanged() -> None:
    from stoker_engine.server.responses.request import ResponsesRequest

    schema = {"type": "object", "properties": {"a": {"enum": [None, 1], "default": None}}, "x": {"schema_": None}}
    text_format = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    body = ResponsesRequest.model_validate({"input": "a", "text": {"format": text_format}})
    assert body.text is not None
    answer_format = body.to_request([]).answer_format
    assert answer_format is not None
    assert answer_format.json == schema
    assert body.text.model_dump(by_alias=True, exclude_none=True)["format"]["schema"] == schema


def test_sampling_fields_reach_the_engine(client: TestClient, engine: FakeEngine) -> None:
    ask(
        client,
        max_output_tokens=7,
        temperature=0.5,
        top_k=3,
        min_p=0.1,
        seed=4,
        stop=["x"],
        repetition_penalty=1.5,
        logit_bias={"7": 3},
        include=["message.output_text.logprobs"],
        top_logprobs=3,
        cache_salt="s",
    )
    _, params = engine.requests_seen[-1]
    assert (params.max_tokens, params.temperature, params.top_k, params.min_p, params.seed) == (7, 0.5, 3, 0.1, 4)
    assert (list(params.stop), params.repetition_penalty, params.logprobs) == (["x"], 1.5, 3)
    assert engine.options[-1]["cache_salt"] == "s"
    ask(client)
    assert engine.requests_seen[-1][1].logprobs is None


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([user("hi")], [user("hi")]),
        (
            [{"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "a"}]}],
            [{"role": "developer", "content": [{"type": "text", "text": "a"}]}],
        ),
        ([{"role": "user", "content": []}], [user("")]),
        (
            [THOUGHT, ASSISTANT_MESSAGE, CALL, {**CALL, "call_id": "c2"}, RESULT],
            [
                {
                    "role": "assistant",
                    "reasoning": "hm",
                    "content": "well, no",
                    "tool_calls": [call_in_chat(), call_in_chat("c2")],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "2"},
            ],
        ),
        ([CALL], [{"role": "assistant", "tool_calls": [call_in_chat()]}]),
        ([THOUGHT, user("go on")], [{"role": "assistant", "reasoning": "hm", "content": ""}, user("go on")]),
        (
            [ASSISTANT_MESSAGE, ASSISTANT_MESSAGE, CALL, THOUGHT, CALL],
            [
                {"role": "assistant", "content": "well, no"},
                {"role": "assistant", "content": "well, no", "tool_calls": [call_in_chat()]},
                {"role": "assistant", "reasoning": "hm", "tool_calls": [call_in_chat()]},
            ],
        ),
        ([{"type": "reasoning", "summary": []}, user("a")], [user("a")]),
        (
            [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]}, ASSISTANT_MESSAGE],
            [{"role": "assistant", "reasoning": "s", "content": "well, no"}],
        ),
        (
            [{**RESULT, "output": [{"type": "input_text", "text": "2"}]}],
            [{"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "2"}]}],
        ),
    ],
)
def test_items_become_messages(items: list[Any], expected: list[Any]) -> None:
    def for_template(messages: list[Message]) -> list[dict[str, Any]]:
        return [message.for_template() for message in messages]

    known = from_json(json.dumps(items).encode())
    in_chat = for_template([ChatMessage.model_validate(message).to_message() for message in expected])
    assert for_template(messages(known)) == in_chat
    assert for_template(messages(from_json(to_json(known)))) == in_chat, "stored items become the same messages"


def test_no_text_of_an_item_is_lost() -> None:
    """Each text appears once in the messages, in the order of the items, whatever their kinds."""
    rng = random.Random(0)
    for _ in range(300):
        texts = [f"<{number}>" for number in range(rng.randint(1, 9))]
        items: list[dict[str, Any]] = []
        for text in texts:
            items.append(
                rng.choice(
                    [
                        {"role": rng.choice(["user", "assistant", "system"]), "content": text},
                        {**THOUGHT, "content": [{"type": "reasoning_text", "text": text}]},
                        {**CALL, "arguments": json.dumps({"a": text})},
                        {**RESULT, "output": text},
                    ]
                )
            )
        written = json.dumps([asdict(message) for message in messages(from_json(json.dumps(items).encode()))])
        positions = [written.index(text) for text in texts]
        assert positions == sorted(positions)
        assert written.count("<") == len(texts)


def test_instructions_come_first_and_are_not_carried_over(client: TestClient, engine: FakeEngine) -> None:
    first = ask(client, input="one", instructions="be brief")
    assert engine.tokenizer.rendered["messages"] == [{"role": "system", "content": "be brief"}, user("one")]
    second = ask(client, input=[user("two")], instructions="be long", previous_response_id=first["id"])
    answer = {"role": "assistant", "content": "hello world"}
    chat_format = [user("one"), answer, user("two")]
    assert engine.tokenizer.rendered["messages"] == [{"role": "system", "content": "be long"}, *chat_format]
    assert second["previous_response_id"] == first["id"]
    client.delete(f"{PATH}/{first['id']}")
    ask(client, input="three", previous_response_id=second["id"])
    assert engine.tokenizer.rendered["messages"] == [*chat_format, answer, user("three")], (
        "the whole conversation is stored"
    )


def test_the_output_of_a_response_is_accepted_as_input(client: TestClient, engine: FakeEngine) -> None:
    answer = ask(client, include=["message.output_text.logprobs"], top_logprobs=1)
    assert len(answer["output"][0]["content"][0]["logprobs"]) == len("hello world")
    ask(client, input=[user("hi"), *answer["output"], user("and")])
    assert engine.tokenizer.rendered["messages"][1] == {"role": "assistant", "content": "hello world"}


def test_an_incomplete_assistant_message_is_continued(client: TestClient, engine: FakeEngine) -> None:
    half = {**ASSISTANT_MESSAGE, "status": "incomplete"}
    ask(client, input=[user("hi"), half])
    assert engine.tokenizer.rendered["continue_final_message"] is True
    for items in ([user("hi"), ASSISTANT_MESSAGE], [half, user("hi")], [user("hi"), THOUGHT]):
        ask(client, input=items)
        assert engine.tokenizer.rendered["continue_final_message"] is False


def test_tools_reach_the_template(make_client: MakeClient, engine: FakeEngine) -> None:
    client = make_client(tool_call_parser="hermes")
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    ask(client, tools=[{"type": "function", "strict": False, **function}])
    known = {"type": "function", "function": function}
    assert engine.tokenizer.rendered["tools"] == [known]
    other = {**known, "function": {**function, "name": "g"}}
    tools = [{"type": "function", **each["function"]} for each in (known, other)]  # type: ignore[dict-item]
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]}
    assert ask(client, tools=tools, tool_choice=allowed)["tool_choice"] == allowed
    assert engine.tokenizer.rendered["tools"] == [other]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "thing"}}}}, "text.format"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "a"}, "text": {"format": {"type": "json_object"}}}, "structured_outputs"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"tool_choice": {"type": "function", "name": "g"}, "tools": [{"type": "function", "name": "f"}]},
            "tool_choice",
        ),
        ({"include_reasoning": False, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
    ],
)
def test_refusals_name_the_fields_of_this_api(address: str, body: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        answer = httpx.post(f"{address}{PATH}", json={"input": "hi", "stream": stream, **body}, timeout=60)
        assert error_of(answer, 400)["param"] == param


def test_max_output_tokens_makes_the_response_incomplete(client: TestClient) -> None:
    answer = ask(client, max_output_tokens=4)
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["completed_at"] is None
    (message,) = answer["output"]
    assert (message["status"], message["content"][0]["text"]) == ("incomplete", "hell")
    assert client.get(f"{PATH}/{answer['id']}").json() == answer


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input[0]"),
        ({"input": [user("a"), {"type": "item_reference", "id": "x"}]}, "input[1]"),
        ({"input": [{"role": "critic", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
        ({"input": [{**user("a"), "mood": 1}]}, "input[0].mood"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "input[0].content[0]"),
        ({"input": [{**CALL, "arguments": {"a": 1}}]}, "input[0].arguments"),
        ({"input": [{**THOUGHT, "encrypted_content": "x"}]}, "input[0].encrypted_content"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [{"type": "file_search", "vector_store_ids": []}]}, "tools[0]"),
        ({"tools": [{"type": "mcp", "server_label": "a"}]}, "tools[0]"),
        ({"tools": [{"type": "code_interpreter", "container": {}}]}, "tools[0]"),
        ({"tools": [{"type": "computer_use_preview"}]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"tools": [{"type": "function", "name": ""}]}, "tools[0].name"),
        ({"text": {"verbosity": "high"}}, "text.verbosity"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x" * 5000}, "input"),
        ({"temperature": -1}, "temperature"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"stream": False, "stream_options": {}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"max_tokens": 3}, "max_tokens"),
        ({"metadata": {str(number): "a" for number in range(17)}}, "metadata"),
        ({"cache_salt": "a@b"}, "cache_salt"),
    ],
)
def test_refusals_name_the_wrong_field(client: TestClient, body: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        error = error_of(client.post(PATH, json={"input": "hi", "stream": stream, **body}), 400)
        assert error["param"] == param


def test_unknown_models_and_responses_are_404(client: TestClient) -> None:
    assert error_of(client.post(PATH, json={"input": "a", "model": "b"}), 404)["param"] == "model"
    error = error_of(client.post(PATH, json={"input": "a", "previous_response_id": "resp_x"}), 404)
    assert error["param"] == "previous_response_id"
    assert "only the server that created a response" in error["message"]
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
        error_of(client.request(method, f"{PATH}/resp_x{path}"), 404)


def test_a_response_is_stored_until_it_is_deleted(client: TestClient) -> None:
    answer = ask(client)
    where = f"{PATH}/{answer['id']}"
    assert client.get(where).json() == answer
    assert error_of(client.get(f"{where}?stream=true"), 400)["param"] == "stream"
    assert error_of(client.get(f"{where}?include=reasoning.encrypted_content"), 400)["param"] == "include"
    assert "background" in error_of(client.post(f"{where}/cancel"), 400)["message"]
    assert client.delete(where).json() == {"id": answer["id"], "object": "response", "deleted": True}
    error_of(client.get(where), 404)
    error_of(client.post(PATH, json={"input": "a", "previous_response_id": answer["id"]}), 404)


def test_store_false_stores_nothing(client: TestClient) -> None:
    answer = ask(client, store=False)
    assert answer["store"] is False
    error_of(client.get(f"{PATH}/{answer['id']}"), 404)


def test_responses_are_hidden_from_other_keys(make_client: MakeClient) -> None:
    client = make_client(api_key=("one", "two"))
    one, two = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
    answer = client.post(PATH, json={"input": "a", "request_id": "same"}, headers=one).json()
    where = f"{PATH}/same"
    assert answer["id"] == "same"
    assert client.get(where, headers={"authorization": "bearer  one "}).status_code == 200
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")):
        error_of(client.request(method, where + path, headers=two), 404)
    error_of(client.post(PATH, json={"input": "b", "previous_response_id": "same"}, headers=two), 404)
    client.post(PATH, json={"input": "b", "request_id": "same"}, headers=two)
    assert client.get(where, headers=one).json() == answer, "another key's response of the same id does not replace it"
    assert client.get(where, headers=two).json() != answer


@pytest.mark.parametrize("keys", [("one", "two"), ()])
def test_the_valid_one_of_two_keys_owns_the_response(make_client: MakeClient, keys: tuple[str, ...]) -> None:
    """Clients send "EMPTY" as a dummy key, and a valid one in Anthropic's header."""
    client = make_client(api_key=keys)
    one, two = ({"authorization": "Bearer EMPTY", "x-api-key": key} for key in ("one", "two"))
    where = f"{PATH}/{client.post(PATH, json={'input': 'a'}, headers=one).json()['id']}"
    error_of(client.get(where, headers=two), 404)
    assert client.get(where, headers=one).status_code == 200
    if keys:  # in either header
        assert client.get(where, headers={"authorization": "Bearer one"}).status_code == 200


def test_responses_with_the_same_request_id_have_different_ids(client: TestClient) -> None:
    """A proxy may use the same id for all requests of a session."""
    ids = {client.post(PATH, json={"input": "a"}, headers={"x-request-id": "r"}).json()["id"] for _ in range(3)}
    assert len(ids) == 3
    assert all(each.startswith("resp_r_") for each in ids)


def test_input_items_are_listed_in_pages(client: TestClient) -> None:
    first = ask(client, input=[user("0"), {**ASSISTANT_MESSAGE, "id": None}])
    second = ask(client, input=[CALL, RESULT, user("4")], previous_response_id=first["id"])
    where = f"{PATH}/{second['id']}/input_items"

    def pages(order: str, limit: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        after: dict[str, str] = {}
        while True:
            page = client.get(where, params={"order": order, "limit": limit, **after}).json()
            assert len(page["data"]) <= limit
            assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
            found += page["data"]
            after = {"after": page["last_id"]}
            if not page["has_more"]:
                return found

    items = pages("asc", 100)
    kinds = ["message", "message", "message", "function_call", "function_call_output", "message"]
    assert [item["type"] for item in items] == kinds
    assert items[2]["content"][0]["text"] == "hello world", "the first answer is input of the second"
    assert len({item["id"] for item in items}) == 6
    for limit in (1, 2, 4, 6):
        assert pages("asc", limit) == items
        assert pages("desc", limit) == items[::-1]
    assert client.get(where).json()["data"] == items[::-1]
    for wrong in ({"limit": 0}, {"limit": 101}, {"order": "up"}, {"after": "x"}):
        error_of(client.get(where, params=wrong), 400)


def test_stored_conversations_are_limited_by_the_request_size(make_client: MakeClient) -> None:
    """Otherwise many small requests could each cause the work of a large one."""
    client = make_client(max_request_bytes=2000)
    answer = ask(client)
    lengths = []
    while answer["store"]:
        listed = client.get(f"{PATH}/{answer['id']}/input_items", params={"limit": 100}).json()["data"]
        lengths.append(len(json.dumps(listed)))
        assert len(lengths) < 20
        answer = ask(client, previous_response_id=answer["id"], input="x" * 300)
    assert len(lengths) > 2
    assert max(lengths) < 2500, "json.dumps adds spaces"


def test_a_response_too_large_to_store_reports_store_false(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ResponseStore, "put", lambda *args: False)
    assert ask(client)["store"] is False
    events = client.post(PATH, json={"input": "a", "stream": True}).text
    last = json.loads(events.rstrip().rpartition("data: ")[2])
    assert last["type"] == "response.completed"
    assert last["response"]["store"] is False


def test_a_gateways_header_sets_the_response_id(client: TestClient) -> None:
    body = {"input": "one", "store": True}
    for name in ("resp_given", "resp_another"):
        headers = {"x-request-id": "shared", "x-stoker-response-id": name}
        answer = client.post("/v1/responses", json=body, headers=headers)
        assert answer.json()["id"] == name and answer.headers["x-request-id"] == "shared"
        assert client.get(f"/v1/responses/{name}").status_code == 200
    chat_format = client.post(
        "/v1/responses", json=body | {"request_id": "mine"}, headers={"x-stoker-response-id": "resp_x"}
    )
    assert chat_format.json()["id"] == "mine"
    odd = client.post("/v1/responses", json=body, headers={"x-stoker-response-id": "two words"})
    assert odd.json()["id"].startswith("resp_")
