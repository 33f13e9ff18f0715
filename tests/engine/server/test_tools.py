"""Tools in chat, with an engine of scripted output: resulting calls, whole and streamed, and the fields that request
them.

The models' formats of calls are tested with their parsers.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from openai import OpenAI
from starlette.testclient import TestClient

from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.contract.frontend_args import FrontendArgs
from stoker_engine.contract.serve_args import ServeArgs
from stoker_engine.server.app import create_app
from stoker_engine.server.conversation.service import Service
from stoker_engine.server.parsers.parts import Content, Part, Reasoning, ToolCallArguments, ToolCallStart, merged

from ..grammar.byte_matcher import SPECIAL, ByteMatcher
from .scripted_engine import ScriptedEngine

MESSAGES: Any = [{"role": "user", "content": "how is the weather?"}]


def function(name: str, parameters: Any = None, **fields: Any) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER, TIME = function("weather", CITY), function("time")
OSLO = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'

MakeOpenAI = Callable[..., OpenAI]


def serve(engine: ScriptedEngine, **frontend: Any) -> TestClient:
    args = ServeArgs(EngineArgs("/models/tiny", served_model_name=("tiny",)), FrontendArgs(**frontend))
    service = Service(args, engine)
    service.on_loaded(engine.info)
    return TestClient(create_app(service), raise_server_exceptions=False)


def openai_client(engine: ScriptedEngine, **frontend: Any) -> OpenAI:
    """Return OpenAI's client of such an engine, whose calls are in Hermes' format."""
    client = serve(engine, **{"tool_call_parser": "hermes", **frontend})
    return OpenAI(base_url="http://testserver/v1", api_key="none", http_client=client, max_retries=0)


def ask(client: OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": "tiny", "messages": MESSAGES, "tools": [WEATHER, TIME], **fields})


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]


def test_calls_are_separated_from_the_text_around_them() -> None:
    client = openai_client(ScriptedEngine(f"Let me see.\n{OSLO}\n{NOW}", "Nothing to call."))
    choice = ask(client).choices[0]
    assert calls_of(choice.message) == [("weather", {"city": "Oslo"}), ("time", {})]
    assert choice.message.tool_calls[0].function.arguments == '{"city": "Oslo"}', "as the model wrote it"
    assert choice.message.content.strip() == "Let me see."
    assert choice.finish_reason == "tool_calls"
    ids = [call.id for call in choice.message.tool_calls]
    assert len(set(ids)) == 2
    assert all(id.startswith("chatcmpl-tool-") for id in ids)
    choice = ask(client).choices[0]
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (
        "Nothing to call.",
        None,
        "stop",
    )


def test_content_is_null_if_there_are_only_calls() -> None:
    answer = serve(ScriptedEngine(OSLO), tool_call_parser="hermes").post(
        "/v1/chat/completions", json={"messages": MESSAGES, "tools": [WEATHER]}
    )
    message = answer.json()["choices"][0]["message"]
    assert message["content"] is None
    assert "reasoning" not in message


@pytest.mark.parametrize("piece", [1, 7, 1000])
@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize(
    "text", [f"Let me see.{OSLO}{NOW}", OSLO, "no calls", f"{OSLO[:-3]}", f"{OSLO} and {NOW} then"]
)
def test_streamed_answer_equals_the_whole_one(piece: int, waits: bool, text: str) -> None:
    engine = ScriptedEngine(text, text, piece=piece)
    engine.waits_for_reader = waits
    client = openai_client(engine)
    whole = ask(client).choices[0]
    with client.chat.completions.stream(model="tiny", messages=MESSAGES, tools=[WEATHER, TIME]) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert calls_of(streamed.message) == calls_of(whole.message)
    assert (streamed.message.content or "") == (whole.message.content or "")
    assert streamed.finish_reason == whole.finish_reason
    if not whole.message.tool_calls:
        assert whole.message.content == text


def test_the_events_of_a_call_are_openais() -> None:
    events = list(ask(openai_client(ScriptedEngine(f"Hm.{OSLO}{NOW}")), stream=True))
    deltas = [event.choices[0].delta.model_dump(exclude_unset=True) for event in events]
    assert deltas[0] == {"role": "assistant", "content": ""}
    text = [delta for delta in deltas[1:] if "content" in delta]
    assert "".join(delta["content"] for delta in text) == "Hm."
    calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    first, second = (next(at for at, call in enumerate(calls) if call["index"] == number) for number in (0, 1))
    for at, name, arguments in ((first, "weather", '{"city": "Oslo"}'), (second, "time", "{}")):
        assert calls[at] == {
            "index": calls[at]["index"],
            "id": calls[at]["id"],
            "type": "function",
            "function": {"name": name, "arguments": ""},
        }
        rest = [call for call in calls if call["index"] == calls[at]["index"] and call is not calls[at]]
        assert all(set(call) == {"index", "function"} and set(call["function"]) == {"arguments"} for call in rest)
        assert "".join(call["function"]["arguments"] for call in rest) == arguments
    assert deltas[-1] == {}
    assert [event.choices[0].finish_reason for event in events] == [None] * (len(events) - 1) + ["tool_calls"]


@pytest.mark.parametrize("stream", [False, True])
def test_each_choice_is_parsed_independently(stream: bool) -> None:
    text = [f"a{OSLO}", "plain", f"{NOW}{OSLO}", OSLO[:20]]
    client = openai_client(ScriptedEngine(text))
    if stream:
        with client.chat.completions.stream(model="tiny", messages=MESSAGES, tools=[WEATHER, TIME], n=4) as events:
            choices = events.get_final_completion().choices
    else:
        choices = ask(client, n=4).choices
    assert [[name for name, _ in calls_of(choice.message)] for choice in choices] == [
        ["weather"],
        [],
        ["time", "weather"],
        [],
    ]
    assert [choice.message.content or "" for choice in choices] == ["a", "plain", "", OSLO[:20]]
    assert [choice.finish_reason for choice in choices] == ["tool_calls", "stop", "tool_calls", "stop"]


def test_every_token_has_a_logprob_in_text_and_calls() -> None:
    text = f"Hm.{OSLO}"
    client = openai_client(ScriptedEngine(text, text))
    whole = ask(client, logprobs=True, extra_body={"return_token_ids": True})
    events = list(ask(client, logprobs=True, stream=True, extra_body={"return_token_ids": True}))
    logprobs_of_events = [event.choices[0].logprobs for event in events]
    tokens = [token.token for logprobs in logprobs_of_events if logprobs is not None for token in logprobs.content]
    assert "".join(tokens) == text
    assert "".join(token.token for token in whole.choices[0].logprobs.content) == text
    ids = [token for event in events for token in getattr(event.choices[0], "token_ids", None) or ()]
    assert ids == whole.choices[0].token_ids == list(map(ord, text))


def test_calls_are_not_parsed_without_tools_or_with_choice_none() -> None:
    client = openai_client(ScriptedEngine(OSLO, OSLO))
    for choice in (ask(client, tool_choice="none").choices[0], ask(client, tools=None).choices[0]):
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (OSLO, None, "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_parallel_tool_calls_false_returns_one_call(stream: bool) -> None:
    client = openai_client(ScriptedEngine(f"{OSLO}{NOW}{OSLO}"))
    if stream:
        with client.chat.completions.stream(
            model="tiny", messages=MESSAGES, tools=[WEATHER, TIME], parallel_tool_calls=False
        ) as events:
            choice = events.get_final_completion().choices[0]
    else:
        choice = ask(client, parallel_tool_calls=False).choices[0]
    assert calls_of(choice.message) == [("weather", {"city": "Oslo"})]
    assert choice.finish_reason == "tool_calls"


def test_a_truncated_call_is_content() -> None:
    choice = ask(openai_client(ScriptedEngine(OSLO)), max_tokens=20).choices[0]
    assert (choice.message.content, choice.finish_reason) == (OSLO[:20], "length")


def test_strict_tools_are_served_without_enforcement_if_unsupported(caplog: pytest.LogCaptureFixture) -> None:
    engine = ScriptedEngine('[weather(city="Oslo")]', "hello")
    client = openai_client(engine, tool_call_parser="pythonic")
    strict = function("weather", CITY, strict=True)
    message = ask(client, tools=[strict]).choices[0].message
    assert calls_of(message) == [("weather", {"city": "Oslo"})]
    ask(client, tools=[strict])
    assert [params.structured_outputs for _, params in engine.requests_seen] == [None, None]
    assert sum("strict tools are not enforced" in record.message for record in caplog.records) <= 1


@pytest.mark.parametrize("name", [r"\q", r"\ud83d", r"\udc00", r"\u12", "a\tb"])
def test_a_name_that_is_invalid_json_is_content(name: str) -> None:
    text = f'[{{"name": "{name}", "parameters": {{}}}}]'
    client = openai_client(ScriptedEngine(text, text))
    message = ask(client, tool_choice="required").choices[0].message
    assert (message.content, message.tool_calls) == (text, None)
    streamed = ask(client, tool_choice="required", stream=True)
    assert "".join(event.choices[0].delta.content or "" for event in streamed) == text


def test_many_parts_are_merged_in_linear_time() -> None:
    kinds = (Content, Reasoning, ToolCallArguments)
    rng = random.Random(0)
    parts: list[Part] = [rng.choice(kinds)(rng.choice(("", "a", "bc"))) for _ in range(500)]
    for at in sorted(rng.sample(range(500), 20), reverse=True):
        parts.insert(at, ToolCallStart("f"))
    joined = merged(parts)
    assert joined == merged(joined) == merged([*merged(parts[:250]), *parts[250:]])
    assert "".join(str(getattr(part, "text", "")) for part in joined) == "".join(
        str(getattr(part, "text", "")) for part in parts
    )
    assert all(
        type(one) is not type(next) or isinstance(one, ToolCallStart) for one, next in itertools.pairwise(joined)
    )
    # This is fast; if each piece were appended to all previous ones, it would exceed the test's timeout.
    assert merged([Content("some text ")] * 2_000_000) == [Content("some text " * 2_000_000)]


def test_tool_choices_become_structured_outputs() -> None:
    engine = ScriptedEngine(*["{}"] * 8)
    client = openai_client(engine)
    strict = function("weather", CITY, strict=True)

    def structured_outputs_of(**fields: Any) -> Any:
        ask(client, **fields)
        return engine.requests_seen[-1][1].structured_outputs

    assert structured_outputs_of() is None
    assert structured_outputs_of(tool_choice="none", tools=[strict]) is None
    assert structured_outputs_of(tool_choice={"type": "function", "function": {"name": "weather"}}).json == CITY
    required = structured_outputs_of(tool_choice="required", tools=[WEATHER])
    assert required.json["items"]["anyOf"][0]["properties"]["parameters"] == CITY
    kept = structured_outputs_of(tools=[strict, TIME]).structural_tag
    assert {each["begin"] for each in kept["structures"]} > {'<tool_call>\n{"name": "weather", "arguments": '}
    assert [each["schema"] for each in kept["structures"]] == [
        CITY,
        {"type": "object", "properties": {}, "additionalProperties": False},
    ]
    choices = [*(f"choice {number}" for number in range(3000)), SPECIAL]
    either = structured_outputs_of(
        tools=[WEATHER], extra_body={"structured_outputs": {"choice": choices}}
    ).structural_tag
    grammars = ByteMatcher()
    source = grammars.compile(structural_tag=either)
    assert [grammars.accepts(source, text) for text in ("choice 2999", SPECIAL, "choice")] == [True, True, False]
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "time"}}]}
    few = structured_outputs_of(tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert [each["properties"]["name"]["const"] for each in few.json["items"]["anyOf"]] == ["time"]
    assert [tool["function"]["name"] for tool in engine.tokenizer.rendered["tools"]] == ["time"]


@pytest.mark.parametrize(
    "parser, fields, param",
    [
        (None, {}, "tools"),
        (None, {"tool_choice": "auto"}, "tools"),
        ("hermes", {"tools": None, "tool_choice": "required"}, "tool_choice"),
        ("hermes", {"tools": [], "tool_choice": {"function": {"name": "f"}}}, "tool_choice"),
        ("hermes", {"tool_choice": {"type": "function", "function": {"name": "f" * 9999}}}, "tool_choice"),
        ("hermes", {"tool_choice": {"type": "function"}}, "tool_choice"),
        ("hermes", {"tool_choice": "any"}, "tool_choice"),
        ("hermes", {"tool_choice": 1}, "tool_choice"),
        ("hermes", {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}}, "tool_choice"),
        ("hermes", {"tools": [function("f", {"type": "string"})], "tool_choice": "required"}, "tools"),
        ("hermes", {"tools": [function("f", {"type": "array"}, strict=True)]}, "tools"),
        ("hermes", {"tools": [function("")]}, "tools[0].function.name"),
        ("hermes", {"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
        ("pythonic", {"response_format": {"type": "json_object"}}, "tools"),
        ("hermes", {"structured_outputs": {"json": "not json"}}, "structured_outputs.json"),
        ("hermes", {"structured_outputs": {"json": '{"a":1'}}, "structured_outputs.json"),
        ("hermes", {"structured_outputs": {"json": "[" * 100_000}}, "structured_outputs.json"),
        ("hermes", {"tool_choice": "required", "use_beam_search": True, "n": 2}, "tool_choice"),
        ("hermes", {"tools": [function("f", CITY, strict=True)], "use_beam_search": True}, "tools"),
        ("hermes", {"structured_outputs": {"json": False}}, "structured_outputs.json"),
        ("hermes", {"structured_outputs": {"grammar": "("}}, "structured_outputs.grammar"),
        ("hermes", {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": False}}},
         "response_format"),
        ("hermes", {"tool_choice": "required", "allowed_token_ids": [5]}, "tool_choice"),
        ("openai", {"tools": [function("my tool")], "tool_choice": "required"}, "tools"),
        ("hermes", {"functions": [{"name": "f"}]}, "functions"),
        ("hermes", {"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_invalid_tools_are_refused_by_field(
    parser: str | None, fields: dict[str, Any], param: str, stream: bool
) -> None:
    body = {"messages": MESSAGES, "tools": [WEATHER, TIME], **fields}
    if stream and "use_beam_search" not in fields:
        body["stream"] = True
    answer = serve(ScriptedEngine(), tool_call_parser=parser).post("/v1/chat/completions", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param, answer.text
