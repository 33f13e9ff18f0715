"""Calls between XML-like tags, as the models' own chat templates write them; their arguments by the tools' schemas."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Mapping
from typing import Any

import jsonschema
import pytest

from stoker_engine.server.openai.messages import Tool
from stoker_engine.server.parsers.parts import Content, Part, Reasoning, ToolCallArguments, tool_call
from stoker_engine.server.parsers.typed_values import arguments

from ....support.work import assert_linear
from .drawn_calls import draw_text, draw_value
from .reading import Reading, calls_of, text_of
from .rendered import Case, answer, as_recorded, needs_templates, recordings

TEMPLATES = [
    ("Qwen3-Coder", "qwen3_coder"),
    ("Qwen3.5-4B", "qwen3_xml"),
    ("StepFun3.5-Flash", "qwen3_coder"),
    ("GLM-4.6", "glm45"),
    ("GLM-4.7-Flash", "glm45"),
]
TAGS = {
    "qwen3_coder": ("</parameter>", "<parameter=a>", "</function>", "<function=f>", "</tool_call>", "\n"),
    "glm45": ("</arg_value>", "<arg_value>", "</arg_key>", "<arg_key>", "</tool_call>", "<tool_call>f"),
}
TAGS["qwen3_xml"] = TAGS["qwen3_coder"]

#: Within a value these end it: they cannot be distinguished from the tags around it.
AMBIGUOUS = re.compile(r"</parameter>\s*(<parameter=|</function>)|</arg_value>\s*(<arg_key>|</tool_call>)")

#: One call in each format.
ONE = {
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\ntwo\n</parameter>\n"
    "</function>\n</tool_call>",
    "glm45": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n"
    "<arg_value>two</arg_value>\n</tool_call>",
}
CALL = tool_call("f", '{"a": 1, "b": "two"}')


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": "It does.", "parameters": parameters}}


F = tool("f", a={"type": "integer"}, b={"type": "string"})


def drawn_value(draw: random.Random, tags: tuple[str, ...]) -> Any:
    value = draw_value(draw)
    if isinstance(value, str):
        value = draw.choice(("", "\n", " ")) + draw_text(draw) + draw.choice(tags) + draw_text(draw)
        return "ambiguous" if AMBIGUOUS.search(f"{value}\n") or "<|" in value or "<｜" in value else value
    return value


def schema_of(value: Any) -> dict[str, Any]:
    """Return a schema, as tools have them, that `value` meets."""
    match value:
        case bool():
            return {"type": "boolean"}
        case int():
            return {"type": "integer"}
        case float():
            return {"type": "number"}
        case str():
            return {"type": "string"}
        case None:
            return {"type": ["integer", "null"]}
        case list():
            return {"type": "array"}
        case _:
            return {"type": "object"}


def tools_of(calls: Iterable[tuple[str, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return tools whose schemas these calls meet."""
    return [tool(name, **{key: schema_of(value) for key, value in values.items()}) for name, values in calls]


def drawn(template: str, parser: str, seed: str) -> list[Case]:
    draw = random.Random(f"{seed} {template}")
    reasoning = None if template == "Qwen3-Coder" else "Hm."
    tags = [("f", {f"a{i}": f"a{tag}b" for i, tag in enumerate(TAGS[parser])})]
    cases = [answer(template, "", reasoning, tags, tools_of(tags))]
    for content in ("", "", "I look:", "Zwei\n\nAbsätze <b>so</b>."):
        calls = []
        for number in range(draw.randint(1, 4)):
            names = draw.sample(("a", "city", "max_results", "x1", "query"), draw.choice((0, 1, 2, 4)))
            calls.append((f"f{number}", {name: drawn_value(draw, TAGS[parser]) for name in names}))
        cases.append(answer(template, content, reasoning, calls, tools_of(calls)))
    return cases


@pytest.fixture(scope="module")
def recorded() -> dict[str, list[Case]]:
    return recordings(
        "xml_calls", lambda: {template: drawn(template, parser, "recorded") for template, parser in TEMPLATES}
    )


def check(parser: str, case: Case) -> None:
    thinks = None if case["reasoning"] is None else "glm45" if parser == "glm45" else "qwen3"
    calls = [tuple(call) for call in case["calls"]]
    parts = Reading(case["prompt"], thinks, parser, tools_of(calls)).however_cut(case["text"])
    assert calls_of(parts) == calls
    assert text_of(parts, Content).strip() == case["content"]
    assert text_of(parts, Reasoning).strip() == (case["reasoning"] or "")
    if case["content"]:
        assert isinstance(parts[-1], ToolCallArguments)


@pytest.mark.parametrize(("template", "parser"), TEMPLATES)
def test_rendered_calls_are_parsed_however_they_are_split(
    template: str, parser: str, recorded: dict[str, list[Case]]
) -> None:
    for case in recorded[template]:
        check(parser, case)


@needs_templates
@pytest.mark.parametrize(("template", "parser"), TEMPLATES)
def test_templates_render_the_recordings_and_further_calls_are_parsed(
    template: str, parser: str, recorded: dict[str, list[Case]]
) -> None:
    assert as_recorded(drawn(template, parser, "recorded")) == recorded[template]
    for seed in range(5):
        for case in drawn(template, parser, f"further {seed}"):
            check(parser, case)


@pytest.mark.parametrize("parser", ONE)
def test_text_around_calls_keeps_its_position(parser: str) -> None:
    call_text, reading = ONE[parser], Reading("", None, parser, [F])
    assert reading.however_cut(f"\n\n{call_text}\n{call_text}\n") == [*CALL, *CALL]
    assert reading.however_cut(f"A <b>\n{call_text}\nand\n{call_text} end") == [
        Content("A <b>\n"),
        *CALL,
        Content("\nand\n"),
        *CALL,
        Content(" end"),
    ]
    assert reading.however_cut(" \n") == [Content(" \n")]


@pytest.mark.parametrize("parser", ONE)
def test_tags_within_values_are_text(parser: str) -> None:
    for tag in TAGS[parser]:
        value = f"a{tag}b {tag} \n{tag}c"
        expected = tool_call("f", json.dumps({"a": 1, "b": value}))
        assert Reading("", None, parser, [F]).however_cut(ONE[parser].replace("two", value)) == expected


@pytest.mark.parametrize("parser", ONE)
def test_truncated_calls_are_unchanged_content(parser: str) -> None:
    call_text, reading = ONE[parser], Reading("", None, parser, [F])
    complete = call_text.index("</function>") + len("</function>") if "</function>" in call_text else len(call_text)
    for end in range(1, len(call_text) + 1):
        before = "Look: " if end % 2 else ""
        expected: list[Part] = CALL if end >= complete else [Content(call_text[:end])]
        if before:
            expected = [Content(before), *expected] if end >= complete else [Content(before + call_text[:end])]
        assert reading([before + call_text[:end]]) == expected
        assert reading(before + call_text[:end]) == expected


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("qwen3_coder", "<tool_call>\n</tool_call>"),
        ("qwen3_coder", "<tool_call>f(1)</tool_call>"),
        ("qwen3_coder", '<tool_call>\n{"name": "f"}\n</tool_call>'),
        ("qwen3_coder", "<tool_call>\n<function=>\n</function>\n</tool_call>"),
        ("qwen3_coder", "<function=f\n></function>"),
        ("qwen3_coder", "<function=f>text</function>"),
        ("qwen3_coder", "<function=f><parameter=></parameter></function>"),
        ("qwen3_coder", "<function=f><parameter=a>1</function>"),
        ("qwen3_coder", "<function=f><parameter=a>1</parameter>"),
        ("qwen3_coder", "Write <function=NAME> and then </function>, or <tool_call> for short."),
        ("glm45", "<tool_call></tool_call>"),
        ("glm45", "<tool_call>\n\n</tool_call>"),
        ("glm45", "<tool_call>f<arg_value>1</arg_value></tool_call>"),
        ("glm45", "<tool_call>f<arg_key>a</arg_key>1</tool_call>"),
        ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>1</tool_call>"),
        ("glm45", "<tool_call>f\ng</tool_call>"),
        ("glm45", "<tool_call>f<b></tool_call> and so on"),
    ],
)
def test_malformed_calls_are_unchanged_content(parser: str, text: str) -> None:
    reading = Reading("", None, parser, [F])
    assert reading.however_cut(text) == [Content(text)]
    is_open = text.endswith(("<parameter=a>1</function>", "</parameter>", "<arg_value>1</tool_call>"))
    if not is_open:  # a value that does not end takes in what follows
        assert reading.however_cut(f"{text}\n{ONE[parser]}") == [Content(f"{text}\n"), *CALL]


@pytest.mark.parametrize(
    "text",
    [
        "<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\ntwo\n</parameter>\n</function>",
        "<function=f><parameter=a>1</parameter><parameter=b>two</parameter></function></tool_call>",
        "<tool_call><function=f><parameter=a>1</parameter><parameter=b>two</parameter></function>",
        "<tool_call>\n<tool_call>\n<function=f><parameter=a>1</parameter><parameter=b>two</parameter></function></tool_call>",
    ],
)
def test_calls_with_omitted_tags_are_parsed(text: str) -> None:
    begin = [Content("<tool_call>\n")] if text.startswith("<tool_call>\n<tool_call>") else []
    assert Reading("", None, "qwen3_coder", [F]).however_cut(text) == [*begin, *CALL]


def test_calls_of_unknown_tools_are_calls() -> None:
    for parser, call_text in ONE.items():
        expected = tool_call("f", '{"a": "1", "b": "two"}')
        assert Reading("", None, parser, [tool("g")]).however_cut(call_text) == expected


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("5", {"type": "string"}, "5"),
        ("5", {"type": "integer"}, 5),
        (" -05 ", {"type": "integer"}, -5),
        ("5.0", {"type": "integer"}, 5),
        ("5.5", {"type": "integer"}, "5.5"),
        ("1_000", {"type": "integer"}, "1_000"),
        ("٣", {"type": "integer"}, "٣"),
        ("9" * 3000, {"type": "integer"}, int("9" * 3000)),
        ("9" * 5000, {"type": "integer"}, "9" * 5000),
        ("5", {"type": "number"}, 5),
        ("-.5", {"type": "number"}, -0.5),
        ("+1.", {"type": "number"}, 1.0),
        ("1e-3", {"type": "number"}, 0.001),
        ("1e999", {"type": "number"}, "1e999"),
        ("nan", {"type": "number"}, "nan"),
        ("Infinity", {"type": "number"}, "Infinity"),
        ("True", {"type": "boolean"}, True),
        ("0", {"type": "boolean"}, False),
        ("yes", {"type": "boolean"}, "yes"),
        ("null", {"type": ["string", "null"]}, None),
        ("None", {"type": ["string", "null"]}, "None"),
        ("None", {"type": ["integer", "null"]}, None),
        ("null", {"type": "string"}, "null"),
        ("5", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, 5),
        ("x", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, "x"),
        ("5", {"type": ["string", "integer"]}, 5),
        ("2", {"enum": [1, 2]}, 2),
        ("2", {"enum": ["1", "2"]}, "2"),
        ("2", {"const": 2}, 2),
        ('{"a": [1]}', {"type": "object"}, {"a": [1]}),
        ("{'a': 1}", {"type": "object"}, "{'a': 1}"),
        ('{"a": NaN}', {"type": "object"}, '{"a": NaN}'),
        ("[1, 2", {"type": "array"}, "[1, 2"),
        ("[1]", {"oneOf": [{"type": "array"}, {"type": "string"}]}, [1]),
        ("5", {"type": "array"}, "5"),
        ("[" * 20_000, {"type": "array"}, "[" * 20_000),
        ("[" * 20_000 + "]" * 20_000, {"type": "array"}, "[" * 20_000 + "]" * 20_000),
        ("[1]", {"$ref": "#/$defs/list"}, [1]),
        ("[1]", {"$ref": "#/$defs/again"}, "[1]"),
        ("[1]", {"$ref": "#/$defs/nothing"}, "[1]"),
        ("[1]", {"$ref": "https://example.org/list"}, "[1]"),
        ("5", {}, "5"),
        ("5", True, "5"),
        ("5", None, "5"),
        ("5", {"type": 7, "enum": 8, "anyOf": 9, "$ref": 10}, "5"),
        ("5", {"type": "int"}, 5),
    ],
)
def test_values_are_converted_to_the_tools_types_or_stay_strings(text: str, schema: Any, value: Any) -> None:
    parameters = {"type": "object", "properties": {"x": schema}}
    parameters["$defs"] = {"list": {"type": "array"}, "again": {"$ref": "#/$defs/again"}}
    offered = [Tool.model_validate({"type": "function", "function": {"name": "f", "parameters": parameters}}).to_tool()]
    written = json.loads(arguments(offered, "f", {"x": text}), parse_constant=pytest.fail)
    assert written == {"x": value}
    assert type(written["x"]) is type(value)


def test_converted_values_meet_the_schema() -> None:
    draw = random.Random(17)
    for _ in range(300):
        value = draw_value(draw)
        schema = schema_of(value)
        parameter_schema = draw.choice(({"anyOf": [schema, {"type": "null"}]}, schema, {"allOf": [schema]}))
        text = value if isinstance(value, str) else json.dumps(value)
        offered = [Tool.model_validate(tool("f", x=parameter_schema)).to_tool()]
        written = json.loads(arguments(offered, "f", {"x": text}))
        jsonschema.validate(written["x"], parameter_schema)
        assert written == {
            "x": None if text == "null" and parameter_schema is not schema and isinstance(value, str) else value
        }


@pytest.mark.parametrize(
    "parameters",
    [None, {}, {"properties": None}, {"properties": []}, {"properties": {"a": {"allOf": [{}] * 10_000}}}],
)
def test_odd_parameters_of_tools_do_no_harm(parameters: Mapping[str, Any] | None) -> None:
    offered = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    for parser, call_text in ONE.items():
        assert Reading("", None, parser, offered)([call_text]) == tool_call("f", '{"a": "1", "b": "two"}')


@pytest.mark.parametrize(
    ("parser", "begin", "repeated"),
    [
        ("qwen3_coder", "", "<tool_call>\n"),
        ("qwen3_coder", "", "<function=f><parameter=a>"),
        ("qwen3_coder", "<function=f><parameter=a>", "</parameter>\n"),
        ("qwen3_coder", "<function=f><parameter=a>", "</parameter"),
        ("qwen3_coder", "<function=f>", "<parameter=a>b</parameter>"),
        ("qwen3_coder", "<function=", "f"),
        ("qwen3_coder", "<tool_call>", " "),
        ("glm45", "", "<tool_call>f<arg_key>"),
        ("glm45", "<tool_call>f<arg_key>a</arg_key><arg_value>", "</arg_value>\n"),
        ("glm45", "<tool_call>", "f"),
    ],
)
def test_parsing_takes_linear_work(parser: str, begin: str, repeated: str) -> None:
    def read(size: int) -> None:
        text = begin + (repeated * size)[:size]
        assert Reading("", None, parser, [F])(text) == [Content(text)]
        assert Reading("", None, parser, [F])([text]) == [Content(text)]

    assert_linear(read, 1_000)
