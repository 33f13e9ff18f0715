"""Calls forced by a request: required and named ones, whole and streamed, and the grammars that force them."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest
from pydantic import BaseModel

from stoker_engine.core.grammar import Grammar
from stoker_engine.core.structured_outputs import StructuredOutputs
from stoker_engine.grammar.compile import compile_grammar
from stoker_engine.grammar.grammars import Grammars
from stoker_engine.grammar.token_table import TokenTable
from stoker_engine.server.openai.messages import Tool
from stoker_engine.server.parsers.forced_calls import NamedCall, RequiredCalls
from stoker_engine.server.parsers.harmony import MARKERS
from stoker_engine.server.parsers.parts import Content, Part, ToolCallArguments, ToolCallStart, merged
from stoker_engine.server.parsers.tool_use import ToolUse
from stoker_engine.server.parsers.tools.openai import OpenAIToolParser

from .scripted_engine import ScriptedEngine
from .test_tools import CITY, MESSAGES, TIME, WEATHER, ask, calls_of, function, openai_client

FORCED = '[{"name": "weather", "parameters": {"city": "Øy \\"}\\\\"}}, {"name":"time","parameters":{}}]'


@pytest.mark.parametrize("piece", [1, 3, 1000])
@pytest.mark.parametrize("parser", ["hermes", None])
def test_required_calls_are_returned(piece: int, parser: str | None) -> None:
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


def test_forced_arguments_are_streamed_while_they_are_generated() -> None:
    engine = ScriptedEngine(FORCED)
    pieces = [
        event.choices[0].delta.tool_calls[0].function.arguments
        for event in ask(openai_client(engine), tool_choice="required", stream=True)
        if event.choices[0].delta.tool_calls
    ]
    assert len(pieces) > 20, "the arguments are streamed in pieces"


@pytest.mark.parametrize("stream", [False, True])
def test_a_named_call_is_returned(stream: bool) -> None:
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


def test_ids_of_forced_calls_match_the_models_format() -> None:
    tools = [WEATHER, TIME]
    for parser, pattern in (("mistral", "[a-zA-Z0-9]{9}"), ("kimi_k2", r"functions\.\w+:\d")):
        client = openai_client(ScriptedEngine(FORCED), tool_call_parser=parser)
        calls = ask(client, tools=tools, tool_choice="required").choices[0].message.tool_calls
        assert len({call.id for call in calls}) == len(calls) > 1
        assert all(re.fullmatch(pattern, call.id) for call in calls)


def test_max_tokens_may_cut_off_a_forced_call() -> None:
    client = openai_client(ScriptedEngine(FORCED, FORCED))
    choice = ask(client, tool_choice="required", max_tokens=45).choices[0]
    call = choice.message.tool_calls[0].function
    assert (call.name, choice.finish_reason) == ("weather", "length")
    assert FORCED[:45].endswith(call.arguments)
    choice = ask(client, tool_choice="required", max_tokens=12).choices[0]
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (FORCED[:12], None, "length")


@pytest.mark.parametrize(
    "text, complete",
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
def test_a_forced_call_cut_by_a_stop_string_does_not_finish_with_tool_calls(
    text: str, complete: bool, stream: bool
) -> None:
    client = openai_client(ScriptedEngine(text))
    if stream:
        *_, last = ask(client, tool_choice="required", stream=True)
    else:
        last = ask(client, tool_choice="required")
        assert last.choices[0].message.tool_calls
    assert last.choices[0].finish_reason == ("tool_calls" if complete else "stop")


HARMONY_CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city":"Oslo"}'
HARMONY_THOUGHT = "<|channel|>analysis<|message|>Hm. {<|end|><|start|>assistant"


@pytest.mark.parametrize("reasoning", [None, "openai_gptoss"])
@pytest.mark.parametrize("text", [HARMONY_CALL, HARMONY_THOUGHT + HARMONY_CALL])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_gpt_oss_is_forced_to_call_in_harmonys_format(reasoning: str | None, text: str, choice: Any) -> None:
    engine = ScriptedEngine(text, text)
    client = openai_client(engine, tool_call_parser="openai", reasoning_parser=reasoning)
    message = ask(client, tool_choice=choice).choices[0].message
    assert calls_of(message) == [("weather", {"city": "Oslo"})]
    assert bool(message.content) == (reasoning is None and "analysis" in text)
    streamed = list(ask(client, tool_choice=choice, stream=True))
    assert sum(bool(event.choices[0].delta.tool_calls) for event in streamed) == 2
    structured = engine.requests_seen[-1][1].structured_outputs
    assert structured is not None
    assert structured.begins_after is None, "a model that is free to choose a channel may call none"


def test_the_harmony_grammar_permits_only_reasoning_and_calls() -> None:
    ids = {marker: 256 + number for number, marker in enumerate(MARKERS)}
    end = 256 + len(ids)
    grammars = Grammars(end + 1, [end])
    vocabulary = [*(bytes([byte]) for byte in range(256)), *(marker.encode() for marker in MARKERS), b""]
    grammars.set_token_table(TokenTable.of(vocabulary, [*ids.values(), end]))
    tools = [Tool.model_validate(function(name, CITY)).to_tool() for name in ("weather", "time")]
    tag = {"type": "structural_tag", "format": OpenAIToolParser.forced_call(tools)}
    source = compile_grammar(StructuredOutputs(structural_tag=tag, disable_any_whitespace=True), ids)
    markers = re.compile(f"({'|'.join(map(re.escape, MARKERS))})")

    def keeps(text: str) -> tuple[bool, bool]:
        """Return whether the grammar permits `text`, and may end there."""
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


def parts_of(parser: Any, pieces: Sequence[str]) -> list[Part]:
    return merged([part for piece in pieces for part in parser.feed(piece)] + parser.end())


def test_forced_calls_do_not_depend_on_how_text_is_split() -> None:
    tools = [Tool.model_validate(tool).to_tool() for tool in (WEATHER, TIME)]
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
        arguments = "".join(part.text for part in whole[1:] if not isinstance(part, ToolCallStart))
        assert arguments.replace(" ", "") == text.replace(" ", "")


class Node(BaseModel):
    """A recursive type, like pydantic's schemas of trees."""

    name: str
    children: list[Node] = []


class Shop(BaseModel):
    class Item(BaseModel):
        name: str
        size: int

    items: list[Item]


def test_the_forced_schema_permits_only_valid_calls() -> None:
    tools = [
        Tool.model_validate(function("node", Node.model_json_schema())).to_tool(),
        Tool.model_validate(function("shop", Shop.model_json_schema())).to_tool(),
        Tool.model_validate(function("none")).to_tool(),
        Tool.model_validate(function("free", {"properties": {"$ref": {"const": {"$ref": "#/x"}}}})).to_tool(),
    ]
    use = ToolUse.of(tools, "required")
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
    one = jsonschema.Draft202012Validator(ToolUse.of(tools, "required", parallel=False).schema)
    call = {"name": "none", "parameters": {}}
    assert one.is_valid([call])
    assert not one.is_valid([call, call])
    for choice, tool in ((random.Random(number).choice(tools), number) for number in range(4)):
        named = ToolUse.of(tools, "required", parallel=bool(tool)).schema
        assert {each["properties"]["name"]["const"] for each in named["items"]["anyOf"]} >= {choice.name}
