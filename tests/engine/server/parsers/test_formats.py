"""Special cases of call formats."""

from __future__ import annotations

import itertools
import json

import jsonschema
import pytest

from stoker_engine.server.openai.messages import Tool
from stoker_engine.server.parsers.registry import tool_parser

from ...grammar.byte_matcher import SPECIAL, SPECIAL_ID, ByteMatcher
from .drawn_calls import parse

CALL = ("f", {"a": 1})
TOOLS = [
    Tool.model_validate({"type": "function", "function": {"name": name, "parameters": parameters}}).to_tool()
    for name, parameters in (
        ("get_weather", {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}),
        ("now", None),
    )
]


@pytest.mark.parametrize(
    ("parser", "text", "calls", "content"),
    [
        # A complete call at the end of the answer needs no closing.
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}', [CALL], ""),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}\n</tool', [CALL], ""),
        ("deepseek_v3", '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": 1}\n``', [CALL], ""),
        ("kimi_k2", '<|tool_call_begin|>f:0<|tool_call_argument_begin|>{"a": 1}', [CALL], ""),
        # An incomplete call is content, and hides no following call.
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": "b</tool_call>'
            '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>',
            [CALL],
            '<tool_call>{"name": "f", "arguments": {"a": "b</tool_call>',
        ),
        (
            "deepseek_v31",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f"
            '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
            [CALL],
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f",
        ),
        ("llama3_json", '{{"name": "f", "parameters": {"a": 1}}}', [CALL], "{}"),
        # Complete calls of an array are calls, whatever follows.
        ("granite", '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}, {"name": 5}]', [CALL], ', {"name": 5}]'),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"na', [CALL], ', {"na'),
        # Granite's and Mistral's calls may omit arguments; other formats require them.
        ("granite", '<|tool_call|>[{"name": "f"}]', [("f", {})], ""),
        ("granite", ' <tool_call> [{"name": "f", "arguments": null}]', [("f", {})], ""),
        ("mistral", '[TOOL_CALLS]{"name": "f"}', [("f", {})], ""),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', [], '<tool_call>{"name": "f"}</tool_call>'),
        # Arguments are an object, or a string that holds one.
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [CALL], ""),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', [], None),
        ("hermes", '<tool_call>{"name": "f", "arguments": "x"}</tool_call>', [], None),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', [], None),
        ("mistral", "[TOOL_CALLS]f[ARGS][1]", [], None),
        ("mistral", "[TOOL_CALLS][]", [], None),
        ("mistral", "[TOOL_CALLS][ARGS]{}", [], None),
        # Names can be sent.
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>', [], None),
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', [], None),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>', [("f", {"a": "\ud800"})], ""),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\ud800\\"}"}</tool_call>', [], None),
        ("pythonic", "[f(a='\\ud800')]", [("f", {"a": "\ud800"})], ""),
        # Mistral's later formats.
        ("mistral", 'One [TOOL_CALLS]f{"a": 1}[TOOL_CALLS]f[ARGS] {"a": 1}', [CALL, CALL], "One "),
        # Llama's format, and JSON that is not one of its calls.
        (
            "llama3_json",
            '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; '
            '{"type": "function", "name": "f", "arguments": {"a": 1}}',
            [CALL, CALL],
            "",
        ),
        ("llama3_json", '{"answer": {"name": "f", "parameters": {}}}', [], None),
        ("llama3_json", '<|python_tag|>search.call(query="x")', [], None),
        # Calls in Python syntax must start the answer.
        ("pythonic", "So: [f(a=1)]", [], None),
        ("pythonic", "[f(a=1) and so on]", [], None),
        ("llama4_pythonic", "So: <|python_start|>[f(a=1)]<|python_end|>", [CALL], "So: "),
        ("llama4_pythonic", "[f(a=1)]<|python_end|>", [CALL], ""),
    ],
)  # fmt: skip
def test_special_cases_are_parsed_as_calls_or_content(
    parser: str, text: str, calls: list[tuple[str, object]], content: str | None
) -> None:
    for pieces in ([text], list(text)):
        whole = parse(parser, pieces)
        assert whole.calls == calls
        assert whole.content == (text if content is None else content)


def test_call_ids_follow_kimis_and_mistrals_formats() -> None:
    text = '<|tool_call_begin|>functions.f:3<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>'
    assert parse("kimi_k2", [text]).ids == ["functions.f:3"]
    calls = '{"name": "f", "id": "call00001"}, {"name": "f"}, {"name": "f", "id": "short"}, {"name": "f", "id": 5}'
    first, *other_ids = parse("mistral", [f"[TOOL_CALLS][{calls}]"]).ids
    assert first == "call00001"
    assert len({*other_ids, first}) == 4
    for id in other_ids:
        assert id is not None
        assert len(id) == 9
        assert id.isalnum()
    assert parse("mistral", ["[TOOL_CALLS]f[CALL_ID]abcdefgh9[ARGS]{}"]).ids == ["abcdefgh9"]


@pytest.mark.parametrize("parser", ["deepseek_v3", "deepseek_v31", "granite", "granite4", "hermes", "llama3_json"])
def test_text_forced_by_a_structural_tag_is_parsed_as_a_call(parser: str) -> None:
    kind = tool_parser(parser)
    tag = kind.structural_tag(TOOLS)
    assert tag["type"] == "structural_tag"
    assert len(tag["structures"]) % len(TOOLS) == 0
    for tool, structure in zip(itertools.cycle(TOOLS), tag["structures"], strict=False):
        assert any(structure["begin"].startswith(trigger) for trigger in tag["triggers"])
        jsonschema.Draft202012Validator.check_schema(structure["schema"])
        arguments = {"city": 'Zürich "\\'}
        jsonschema.validate(arguments, structure["schema"])
        text = structure["begin"] + json.dumps(arguments) + structure["end"]
        assert parse(parser, [text]).parts == parse(parser, text).parts
        assert parse(parser, [f"Well: {text}"]).calls == [(tool.name, arguments)]


@pytest.mark.parametrize("token", [SPECIAL, "<|tool_call|>"])
def test_each_beginning_of_granites_calls_constrains_the_arguments(token: str) -> None:
    """`SPECIAL` stands for a special token; without it, both beginnings are text."""
    tag = json.loads(json.dumps(tool_parser("granite").structural_tag(TOOLS)).replace("<|tool_call|>", token))
    matcher = ByteMatcher()
    source = matcher.compile(structural_tag=tag)
    for begin in (token, "<tool_call>"):
        beginning = [SPECIAL_ID] if begin == SPECIAL else list(begin.encode())
        for call, is_valid in (
            ('[{"name": "get_weather", "arguments": {"city": "Bern"}}]', True),
            ('[{"name": "now", "arguments": {}}]', True),
            ('[{"name": "get_weather", "arguments": {"city": 5}}]', False),
            ('[{"name": "other", "arguments": {}}]', False),
        ):
            answer = [*b"Well: ", *beginning, *call.encode()]
            assert matcher.accepts(source, answer) == is_valid
            assert matcher.accepts(source, [*answer, *b" ok ", *beginning, *call.encode()]) == is_valid
    assert matcher.accepts(source, "no call")
