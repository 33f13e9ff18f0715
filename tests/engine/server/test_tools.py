"""Tools in chat, over an engine that says what a model would: which calls come out, whole and streamed, and what asks
for them. How each model writes calls is tested with its parser."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import jsonschema
import pytest
from openai import OpenAI
from pydantic import BaseModel
from starlette.testclient import TestClient

from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.contract.frontend_args import FrontendArgs
from stoker_engine.contract.serve_args import ServeArgs
from stoker_engine.core.grammar import Grammar
from stoker_engine.core.structured_outputs import StructuredOutputs
from stoker_engine.grammar.compile import compile_grammar
from stoker_engine.grammar.grammars import Grammars
from stoker_engine.grammar.token_table import TokenTable
from stoker_engine.server.app import create_app
from stoker_engine.server.conversation.service import Service
from stoker_engine.server.parsers.forced_calls import NamedCall, RequiredCalls
from stoker_engine.server.parsers.harmony import MARKERS
from stoker_engine.server.parsers.parts import Content, Part, Reasoning, ToolCallArguments, ToolCallStart, merged
from stoker_engine.server.parsers.tools.openai import OpenAIToolParser
from stoker_engine.server.schema.messages import Tool
from stoker_engine.server.schema.tool_choice import ToolUse

from ..grammar.byte_matcher import SPECIAL, ByteMatcher
from .scripted_engine import ScriptedEngine

MESSAGES: Any = [{"role": "user", "content": "how is the weather?"}]


def function(name: str, parameters: Any = None, **fields: Any) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER, TIME = function("weather", CITY), function("time")
OSLO = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
FORCED = '[{"name": "weather", "parameters": {"city": "Øy \\"}\\\\"}}, {"name":"time","parameters":{}}]'

MakeOpenAI = Callable[..., OpenAI]


def serve(engine: ScriptedEngine, **frontend: Any) -> TestClient:
    args = ServeArgs(EngineArgs("/models/tiny", served_model_name=("tiny",)), FrontendArgs(**frontend))
    service = Service(args, engine)
    service.on_loaded(engine.info)
    return TestClient(create_app(service), raise_server_exceptions=False)


def openai_client(engine: ScriptedEngine, **frontend: Any) -> OpenAI:
    """OpenAI's own client of such an engine, whose calls are Hermes'."""
    client = serve(engine, **{"tool_call_parser": "hermes", **frontend})
    return OpenAI(base_url="http://testserver/v1", api_key="none", http_client=client, max_retries=0)


def ask(client: OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": "tiny", "messages": MESSAGES, "tools": [WEATHER, TIME], **fields})


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]


def test_calls_and_the_text_around_them() -> None:
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


def test_content_is_null_where_there_are_only_calls() -> None:
    answer = serve(ScriptedEngine(OSLO), tool_call_parser="hermes").post(
        "/v1/chat/completions", json={"messages": MESSAGES, "tools": [WEATHER]}
    )
    message = answer.json()["choices"][0]["message"]
    assert message["content"] is None
    assert "reasoning" not in message


@pytest.mark.parametrize("piece", [1, 7, 1000])
@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize(
    "said", [f"Let me see.{OSLO}{NOW}", OSLO, "no calls", f"{OSLO[:-3]}", f"{OSLO} and {NOW} then"]
)
def test_streamed_is_whole(piece: int, waits: bool, said: str) -> None:
    engine = ScriptedEngine(said, said, piece=piece)
    engine.waits_for_reader = waits
    client = openai_client(engine)
    whole = ask(client).choices[0]
    with client.chat.completions.stream(model="tiny", messages=MESSAGES, tools=[WEATHER, TIME]) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert calls_of(streamed.message) == calls_of(whole.message)
    assert (streamed.message.content or "") == (whole.message.content or "")
    assert streamed.finish_reason == whole.finish_reason
    if not whole.message.tool_calls:
        assert whole.message.content == said


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
def test_each_choice_is_taken_apart_by_itself(stream: bool) -> None:
    said = [f"a{OSLO}", "plain", f"{NOW}{OSLO}", OSLO[:20]]
    client = openai_client(ScriptedEngine(said))
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


def test_every_token_has_its_logprob_whatever_becomes_of_it() -> None:
    said = f"Hm.{OSLO}"
    client = openai_client(ScriptedEngine(said, said))
    whole = ask(client, logprobs=True, extra_body={"return_token_ids": True})
    events = list(ask(client, logprobs=True, stream=True, extra_body={"return_token_ids": True}))
    logprobs_of_events = [event.choices[0].logprobs for event in events]
    tokens = [token.token for logprobs in logprobs_of_events if logprobs is not None for token in logprobs.content]
    assert "".join(tokens) == said
    assert "".join(token.token for token in whole.choices[0].logprobs.content) == said
    ids = [token for event in events for token in getattr(event.choices[0], "token_ids", None) or ()]
    assert ids == whole.choices[0].token_ids == list(map(ord, said))


def test_no_call_is_looked_for_where_none_is_to_be_made() -> None:
    client = openai_client(ScriptedEngine(OSLO, OSLO))
    for choice in (ask(client, tool_choice="none").choices[0], ask(client, tools=None).choices[0]):
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (OSLO, None, "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_one_call_at_most(stream: bool) -> None:
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


def test_a_call_that_is_cut_off_is_content() -> None:
    choice = ask(openai_client(ScriptedEngine(OSLO)), max_tokens=20).choices[0]
    assert (choice.message.content, choice.finish_reason) == (OSLO[:20], "length")


# Calls that are forced.


@pytest.mark.parametrize("piece", [1, 3, 1000])
@pytest.mark.parametrize("parser", ["hermes", None])
def test_a_required_call(piece: int, parser: str | None) -> None:
    client = openai_client(ScriptedEngine(FORCED, FORCED, piece=piece), tool_call_parser=parser)
    whole = ask(client, tool_choice="required").choices[0]
    assert calls_of(whole.message) == [("weather", {"city": 'Øy "}\\'}), ("time", {})]
    assert (whole.message.content, whole.finish_reason) == (None, "tool_calls")
    with client.chat.completions.stream(
        model="tiny", messages=MESSAGES, tools=[WEATHER, TIME], tool_choice="required"
    ) as events:
        streamed = events.get_final_completion().choices[0]
    assert calls_of(streamed.message) == calls_of(whole.message)
    assert streamed.finish_reason == "tool_calls"


def test_forced_arguments_come_as_they_are_written() -> None:
    engine = ScriptedEngine(FORCED)
    pieces = [
        event.choices[0].delta.tool_calls[0].function.arguments
        for event in ask(openai_client(engine), tool_choice="required", stream=True)
        if event.choices[0].delta.tool_calls
    ]
    assert len(pieces) > 20, "not at once"


@pytest.mark.parametrize("stream", [False, True])
def test_a_named_call(stream: bool) -> None:
    client = openai_client(ScriptedEngine('{"city": "Rome"}'))
    choice = {"type": "function", "function": {"name": "weather"}}
    if stream:
        with client.chat.completions.stream(
            model="tiny", messages=MESSAGES, tools=[WEATHER, TIME], tool_choice=choice
        ) as events:
            answer = events.get_final_completion().choices[0]
    else:
        answer = ask(client, tool_choice=choice).choices[0]
    assert calls_of(answer.message) == [("weather", {"city": "Rome"})]
    assert answer.finish_reason == "stop", "as OpenAI and vLLM have it"


def test_forced_calls_have_the_ids_that_chat_templates_want() -> None:
    tools = [WEATHER, TIME]
    for parser, pattern in (("mistral", "[a-zA-Z0-9]{9}"), ("kimi_k2", r"functions\.\w+:\d")):
        client = openai_client(ScriptedEngine(FORCED), tool_call_parser=parser)
        calls = ask(client, tools=tools, tool_choice="required").choices[0].message.tool_calls
        assert len({call.id for call in calls}) == len(calls) > 1
        assert all(re.fullmatch(pattern, call.id) for call in calls)


def test_what_cannot_be_strict_is_answered_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    engine = ScriptedEngine('[weather(city="Oslo")]', "hello")
    client = openai_client(engine, tool_call_parser="pythonic")
    strict = function("weather", CITY, strict=True)
    message = ask(client, tools=[strict]).choices[0].message
    assert calls_of(message) == [("weather", {"city": "Oslo"})]
    ask(client, tools=[strict])
    assert [params.structured_outputs for _, params in engine.requests_seen] == [None, None]
    assert sum("not kept to their schemas" in record.message for record in caplog.records) <= 1


def test_a_forced_call_that_is_cut_off() -> None:
    client = openai_client(ScriptedEngine(FORCED, FORCED))
    choice = ask(client, tool_choice="required", max_tokens=45).choices[0]
    call = choice.message.tool_calls[0].function
    assert (call.name, choice.finish_reason) == ("weather", "length")
    assert FORCED[:45].endswith(call.arguments)
    choice = ask(client, tool_choice="required", max_tokens=12).choices[0]
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (FORCED[:12], None, "length")


@pytest.mark.parametrize(
    "said, complete",
    [
        (FORCED[: FORCED.index(":{}")], False),
        (FORCED[: FORCED.index("{}") + 1], False),
        (FORCED[: FORCED.index("{}") + 2], True),
        (FORCED[: FORCED.index('"city"')], False),
        (FORCED[: FORCED.index("}}, ")], False),
        (FORCED[: FORCED.index("}}, ") + 1], True),
        ('[{"name": "weather", "parameters": {"city": tru}}]', False),
        ('[{"name": "weather", "parameters": {"city" 1}}]', False),
        (FORCED, True),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_that_a_stop_string_cuts_off_is_not_to_be_run(said: str, complete: bool, stream: bool) -> None:
    client = openai_client(ScriptedEngine(said))
    if stream:
        *_, last = ask(client, tool_choice="required", stream=True)
    else:
        last = ask(client, tool_choice="required")
        assert last.choices[0].message.tool_calls
    assert last.choices[0].finish_reason == ("tool_calls" if complete else "stop")


HARMONY_CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city":"Oslo"}'
HARMONY_THOUGHT = "<|channel|>analysis<|message|>Hm. {<|end|><|start|>assistant"


@pytest.mark.parametrize("reasoning", [None, "openai_gptoss"])
@pytest.mark.parametrize("said", [HARMONY_CALL, HARMONY_THOUGHT + HARMONY_CALL])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_gpt_oss_is_forced_to_call_in_its_own_words(reasoning: str | None, said: str, choice: Any) -> None:
    engine = ScriptedEngine(said, said)
    client = openai_client(engine, tool_call_parser="openai", reasoning_parser=reasoning)
    message = ask(client, tool_choice=choice).choices[0].message
    assert calls_of(message) == [("weather", {"city": "Oslo"})]
    assert bool(message.content) == (reasoning is None and "analysis" in said)
    streamed = list(ask(client, tool_choice=choice, stream=True))
    assert sum(bool(event.choices[0].delta.tool_calls) for event in streamed) == 2
    structured = engine.requests_seen[-1][1].structured_outputs
    assert structured is not None
    assert structured.begins_after is None, "a model that is free to choose a channel may call none"


def test_what_gpt_oss_is_forced_to_write() -> None:
    ids = {marker: 256 + number for number, marker in enumerate(MARKERS)}
    end = 256 + len(ids)
    grammars = Grammars(end + 1, [end])
    vocabulary = [*(bytes([byte]) for byte in range(256)), *(marker.encode() for marker in MARKERS), b""]
    grammars.set_token_table(TokenTable.of(vocabulary, [*ids.values(), end]))
    tools = [Tool.model_validate(function(name, CITY)) for name in ("weather", "time")]
    tag = {"type": "structural_tag", "format": OpenAIToolParser.forced_call(tools)}
    source = compile_grammar(StructuredOutputs(structural_tag=tag, disable_any_whitespace=True), ids)
    markers = re.compile(f"({'|'.join(map(re.escape, MARKERS))})")

    def keeps(text: str) -> tuple[bool, bool]:
        """Whether the grammar may write `text`, and end there."""
        tokens = [
            token for piece in markers.split(text) for token in ([ids[piece]] if piece in ids else piece.encode())
        ]
        matcher = grammars.begin(Grammar(source)).matcher
        return matcher.try_consume_tokens(tokens) == len(tokens), matcher.is_accepting()

    for text, is_taken, is_whole in (
        (HARMONY_CALL, True, True),
        (HARMONY_THOUGHT * 2 + HARMONY_CALL, True, True),
        (HARMONY_THOUGHT, True, False),
        (HARMONY_CALL[:-1], True, False),
        ("<|channel|>final<|message|>", False, False),
        ("Hello", False, False),
        (HARMONY_THOUGHT + "<|channel|>final<|message|>no", False, False),
        (HARMONY_CALL.replace("weather", "other"), False, False),
        (HARMONY_CALL.replace('"Oslo"', "5"), False, False),
    ):
        taken, whole = keeps(text)
        assert (taken, taken and whole) == (is_taken, is_whole), text


@pytest.mark.parametrize("name", [r"\q", r"\ud83d", r"\udc00", r"\u12", "a\tb"])
def test_a_name_that_is_no_json_is_content(name: str) -> None:
    said = f'[{{"name": "{name}", "parameters": {{}}}}]'
    client = openai_client(ScriptedEngine(said, said))
    message = ask(client, tool_choice="required").choices[0].message
    assert (message.content, message.tool_calls) == (said, None)
    streamed = ask(client, tool_choice="required", stream=True)
    assert "".join(event.choices[0].delta.content or "" for event in streamed) == said


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
    # In no time; where each piece is added to those before, not within the test's own timeout.
    assert merged([Content("some text ")] * 2_000_000) == [Content("some text " * 2_000_000)]


def parts_of(parser: Any, pieces: Sequence[str]) -> list[Part]:
    return merged([part for piece in pieces for part in parser.feed(piece)] + parser.end())


def test_forced_calls_are_the_same_wherever_they_are_cut() -> None:
    tools = [Tool.model_validate(tool) for tool in (WEATHER, TIME)]
    new_id = lambda name, number: f"{name}-{number}"  # noqa: E731
    texts = [FORCED, "[ ]", "", " [\n", FORCED[:-1], FORCED[:-2], FORCED[:-5] + "x", FORCED + " and more", "no JSON {"]
    texts += [FORCED[:length] for length in range(len(FORCED))]
    for text in texts:
        whole = parts_of(RequiredCalls(tools, new_id), [text])
        assert parts_of(RequiredCalls(tools, new_id), text) == whole
        for cut in range(0, len(text), 5):
            assert parts_of(RequiredCalls(tools, new_id), [text[:cut], text[cut:]]) == whole
    assert parts_of(RequiredCalls(tools, new_id), [FORCED]) == [
        ToolCallStart("weather", "weather-0"),
        ToolCallArguments('{"city": "Øy \\"}\\\\"}'),
        ToolCallStart("time", "time-1"),
        ToolCallArguments("{}"),
    ]
    assert parts_of(RequiredCalls(tools, new_id), ["no calls"]) == [Content("no calls")]
    for text in ('{"city": "a}"} ', ' {"city": 1', "{} tail"):
        whole = parts_of(NamedCall(tools, new_id), [text])
        assert parts_of(NamedCall(tools, new_id), text) == whole
        assert whole[0] == ToolCallStart("weather", "weather-0")
        said = "".join(part.text for part in whole[1:] if not isinstance(part, ToolCallStart))
        assert said.replace(" ", "") == text.replace(" ", "")


class Node(BaseModel):
    """Refers to itself, as pydantic's schemas of trees do."""

    name: str
    children: list[Node] = []


class Shop(BaseModel):
    class Item(BaseModel):
        name: str
        size: int

    items: list[Item]


def test_what_is_forced_is_a_schema_of_calls() -> None:
    tools = [
        Tool.model_validate(function("node", Node.model_json_schema())),
        Tool.model_validate(function("shop", Shop.model_json_schema())),
        Tool.model_validate(function("none")),
        Tool.model_validate(function("free", {"properties": {"$ref": {"const": {"$ref": "#/x"}}}})),
    ]
    use = ToolUse.of(tools, "required", None)
    validator = jsonschema.Draft202012Validator(use.schema)

    def is_valid(*calls: tuple[str, Any]) -> bool:
        return validator.is_valid([{"name": name, "parameters": parameters} for name, parameters in calls])

    tree = {"name": "a", "children": [{"name": "b", "children": []}]}
    assert is_valid(("node", tree), ("shop", {"items": [{"name": "x", "size": 1}]}), ("none", {}))
    assert is_valid(("free", {"$ref": {"$ref": "#/x"}}))
    assert not is_valid()
    assert not is_valid(("node", {"name": "a", "children": [{"children": []}]}))
    assert not is_valid(("shop", {"items": [{"name": "x"}]}))
    assert not is_valid(("shop", tree))
    assert not is_valid(("none", {"a": 1}))
    assert not is_valid(("free", {"$ref": 1}))
    assert not is_valid(("free", []))
    assert not is_valid(("elsewhere", {}))
    one = jsonschema.Draft202012Validator(ToolUse.of(tools, "required", False).schema)
    call = {"name": "none", "parameters": {}}
    assert one.is_valid([call])
    assert not one.is_valid([call, call])
    for choice, tool in ((random.Random(number).choice(tools), number) for number in range(4)):
        named = ToolUse.of(tools, "required", bool(tool)).schema
        assert {each["properties"]["name"]["const"] for each in named["items"]["anyOf"]} >= {choice.function.name}


def test_what_the_engine_is_asked_for() -> None:
    engine = ScriptedEngine(*["{}"] * 8)
    client = openai_client(engine)
    strict = function("weather", CITY, strict=True)

    def asked(**fields: Any) -> Any:
        ask(client, **fields)
        return engine.requests_seen[-1][1].structured_outputs

    assert asked() is None
    assert asked(tool_choice="none", tools=[strict]) is None
    assert asked(tool_choice={"type": "function", "function": {"name": "weather"}}).json == CITY
    required = asked(tool_choice="required", tools=[WEATHER])
    assert required.json["items"]["anyOf"][0]["properties"]["parameters"] == CITY
    kept = asked(tools=[strict, TIME]).structural_tag
    assert {each["begin"] for each in kept["structures"]} > {'<tool_call>\n{"name": "weather", "arguments": '}
    assert [each["schema"] for each in kept["structures"]] == [
        CITY,
        {"type": "object", "properties": {}, "additionalProperties": False},
    ]
    choices = [*(f"choice {number}" for number in range(3000)), SPECIAL]
    either = asked(tools=[WEATHER], extra_body={"structured_outputs": {"choice": choices}}).structural_tag
    grammars = ByteMatcher()
    source = grammars.compile(structural_tag=either)
    assert [grammars.accepts(source, text) for text in ("choice 2999", SPECIAL, "choice")] == [True, True, False]
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "time"}}]}
    few = asked(tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
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
def test_what_is_refused(parser: str | None, fields: dict[str, Any], param: str, stream: bool) -> None:
    body = {"messages": MESSAGES, "tools": [WEATHER, TIME], **fields}
    if stream and "use_beam_search" not in fields:
        body["stream"] = True
    answer = serve(ScriptedEngine(), tool_call_parser=parser).post("/v1/chat/completions", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param, answer.text
