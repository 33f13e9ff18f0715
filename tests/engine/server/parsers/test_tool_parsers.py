"""Invariants of all tool parsers for any output: nothing is lost, and results do not depend on how text is split."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator

import pytest

from stoker_engine.server.parsers.parts import Content, Part
from stoker_engine.server.parsers.registry import tool_parser

from ....support.work import assert_linear
from .drawn_calls import WRITERS, draw_calls, draw_text, parse
from .rendered import RECORDINGS

RENDERED = json.loads((RECORDINGS / "json_calls.json").read_text())
#: A template for each format, which writes its calls.
TEMPLATE = {
    "deepseek_v3": "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    "deepseek_v31": "deepseek-ai-DeepSeek-V3.1",
    "granite4": "ibm-granite-granite-4.0",
    "hermes": "Qwen-Qwen2.5-7B-Instruct",
    "kimi_k2": "moonshotai-Kimi-K2",
    "llama3_json": "meta-llama-Llama-3.1-8B-Instruct",
    "mistral": "mistralai-Mistral-Nemo-Instruct-2407",
}
PARSERS = [*TEMPLATE, *WRITERS]

#: Tokens of each format, for malformed output.
TOKENS = {
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "function",
        "<｜tool▁sep｜>",
        "f\n```json\n",
        "\n```",
    ),
    "deepseek_v31": ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "f", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    "granite": ("<|tool_call|>", "<tool_call>", "[", ", ", "]"),
    "granite4": ("<tool_call>", "</tool_call>", "\n"),
    "hermes": ("<tool_call>", "</tool_call>", "\n"),
    "kimi_k2": ("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.f:0", "<|tool_call_argument_begin|>"),
    "llama3_json": ("<|python_tag|>", "; ", " "),
    "llama4_pythonic": ("<|python_start|>", "[", "f(", "a=1", 'b="x', "c=[", ")", "]", ", ", "<|python_end|>"),
    "mistral": ("[TOOL_CALLS]", "f", "[ARGS]", "[CALL_ID]", "123456789", "[", ", ", "]"),
    "pythonic": ("[", "f(", "a=1", "b='x", "c={", ")", "]", ", "),
}
_JSON_TOKENS = (
    *('{"name": "f", "arguments": {}}', '{"name": "f", "parameters": {"a": 1}}', '{"a": [1]}', '{"name": "f"}'),
    *("{}", '{"', '"', "{", "}", "\\", "text", " "),
)


def texts(parser: str) -> Iterator[str]:
    """Yield the models' output according to their templates."""
    if parser in WRITERS:
        draw = random.Random(parser)
        yield from (WRITERS[parser](draw_calls(draw)) for _ in range(3))
    else:
        yield from (case["text"] for case in RENDERED[TEMPLATE[parser]])


def astray(parser: str, draw: random.Random) -> str:
    """Return tokens of a format in random order."""
    tokens = TOKENS[parser] * 2 + _JSON_TOKENS
    return "".join(draw.choice(tokens) for _ in range(draw.randint(1, 16)))


def mutated(text: str, draw: random.Random) -> str:
    """Return `text` with a few characters deleted, doubled or replaced."""
    characters = list(text)
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(characters))
        characters[at] = draw.choice(("", characters[at] * 2, *'"{}[]<>\\,:` \n', draw_text(draw)))
    return "".join(characters)


def _contents(parts: list[Part]) -> Iterator[str]:
    for part in parts:
        assert isinstance(part, Content)
        yield part.text


def pieces(text: str, draw: random.Random) -> list[str]:
    cuts = sorted(draw.randint(0, len(text)) for _ in range(draw.randint(1, 9)))
    return [text[begin:end] for begin, end in itertools.pairwise([0, *cuts, len(text)])]


def check(parser: str, text: str, draw: random.Random) -> int:
    """Check the invariants for any text; return the number of calls."""
    whole = parse(parser, [text])
    assert parse(parser, text).parts == whole.parts
    assert parse(parser, pieces(text, draw)).parts == whole.parts
    if not whole.calls:
        assert whole.content == text
    at = 0
    for content in whole.contents:  # in order, and unchanged
        at = text.index(content, at) + len(content)
    after = whole.contents[-1]
    assert not after or text.rstrip().endswith(after.rstrip())
    return len(whole.calls)


@pytest.mark.parametrize("parser", PARSERS)
def test_truncated_text_keeps_its_complete_calls_and_loses_nothing(parser: str) -> None:
    draw = random.Random(parser)
    for text in texts(parser):
        whole = parse(parser, [text])
        assert whole.calls
        counts = []
        for end in range(len(text) % 5, len(text), len(text) // 150 + 1):
            counts.append(check(parser, text[:end], draw))
            assert parse(parser, [text[:end]]).calls == whole.calls[: counts[-1]]
        assert counts == sorted(counts)


@pytest.mark.parametrize("parser", PARSERS)
def test_malformed_output_is_content_except_for_its_calls(parser: str) -> None:
    draw = random.Random(f"astray {parser}")
    found = [check(parser, astray(parser, draw), draw) for _ in range(400)]
    found += [check(parser, mutated(text, draw), draw) for text in texts(parser) for _ in range(40)]
    assert 0 in found
    assert any(found)


@pytest.mark.parametrize("parser", PARSERS)
def test_text_around_calls_is_kept_but_white_space_alone_is_not(parser: str) -> None:
    text = next(iter(texts(parser)))
    calls = parse(parser, [text]).calls
    for before, after in (("", " \n"), ("\n\n", ""), (" ", "\n")):
        spaced = parse(parser, [before + text + after])
        assert (spaced.calls, spaced.content) == (calls, "")
    assert parse(parser, [text + "\nDone. "]).contents[-1] == "\nDone. "
    assert parse(parser, ["\n ", "\n"]).parts == [Content("\n \n")]
    if "pythonic" not in parser:  # its calls must start the answer
        around = parse(parser, [f" One \n{text}\n two \n{text}"])
        assert around.calls == calls * 2
        assert [content for content in around.contents if content] == [" One \n", "\n two \n"]


@pytest.mark.parametrize("parser", PARSERS)
def test_text_that_cannot_become_a_call_is_emitted_at_once(parser: str) -> None:
    text = "Is 1 < 2? [1] </b> & so on, `code`, <tool>, <|tool|>, [TOOL] “quoted” "
    reading = tool_parser(parser)(())
    markers = ("<tool_call>", *reading.markers)
    emitted = ""
    for end, character in enumerate(text, 1):
        emitted += "".join(_contents(reading.feed(character)))
        assert text.startswith(emitted)
        held = text[len(emitted) : end]
        assert any(marker.startswith(held) for marker in markers), held
    assert emitted == text
    assert reading.end() == []


@pytest.mark.parametrize("parser", PARSERS)
def test_work_is_linear_in_the_length_of_the_output(parser: str) -> None:
    begin = "".join(TOKENS[parser][:2])
    marker = TOKENS[parser][0]
    for endless in (
        "x\\n",
        marker[:-1] or "[ ",
        marker,
        marker + '{"a": "',
        marker + '{"a": "x',
        marker + '{"a": "x\\n',
        marker + "[",
        marker + " " * 100,
        "[f(a=[",
        '{"a":',
        " ",
    ):
        first = begin + '{"name": "f", "arguments": {"a": "' if endless == "x\\n" else ""

        def read(size: int, first: str = first, endless: str = endless) -> None:
            text = first + endless * (size // len(endless))
            for cut in ([text], text):
                reading = tool_parser(parser)(())
                parts = [part for piece in cut for part in reading.feed(piece)] + reading.end()
                assert "".join(_contents(parts)) == text

        assert_linear(read, 1_000)


def test_a_long_argument_is_parsed_in_linear_time() -> None:
    def read(lines: int) -> None:
        code = 'print("<tool_call>")\n' * lines
        text = f"<tool_call>\n{json.dumps({'name': 'write', 'arguments': {'code': code}})}\n</tool_call>"
        assert parse("hermes", text).calls == [("write", {"code": code})]

    assert_linear(read, 100)
