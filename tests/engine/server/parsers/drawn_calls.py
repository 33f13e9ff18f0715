"""Random tool calls, and the results of parsers."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from stoker_engine.server.parsers.parts import Content, Part, ToolCallArguments, ToolCallStart, merged
from stoker_engine.server.parsers.registry import tool_parser

Call = tuple[str, dict[str, Any]]

#: Pieces of strings: everything that formats quote, escape or use as a terminator.
_PIECES = (
    *"\"'\\/{}[](),:;=<>|` \n\t\r\x00\x1f",
    *("word", "two words", "é", "漢字", "😀", "\u2028", "\\u0041", "\\n", "```", "```json", "\n```", "null", "-1"),
    *("<tool_call>", "</tool_call>", "<|tool_call|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>"),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    *("<|tool_call_begin|>", "functions.f:0", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|python_start|>", "<|python_end|>", "[f(a=1)]"),
    '{"name": "f", "arguments": {}}',
    '{"name": "f", "parameters": {}}',
)


def draw_text(draw: random.Random) -> str:
    """Draw a string, which may be empty."""
    return "".join(draw.choice(_PIECES) for _ in range(draw.choice((0, 1, 2, 3, 8))))


def draw_value(draw: random.Random, depth: int = 0) -> Any:
    """Draw any JSON value."""
    kind = draw.randrange(8 if depth < 3 else 6)
    if kind < 2:
        return draw_text(draw)
    if kind == 2:
        return draw.choice((0, 1, -7, 10**18, 2**70))
    if kind == 3:
        return draw.choice((0.5, -2.25, 1e-9, 3e200))
    if kind < 6:
        return draw.choice((True, False, None))
    size = draw.randrange(4)
    if kind == 6:
        return [draw_value(draw, depth + 1) for _ in range(size)]
    return {draw_text(draw): draw_value(draw, depth + 1) for _ in range(size)}


def draw_call(draw: random.Random) -> Call:
    """Draw a call with names that all formats can write."""
    names = draw.sample(("a", "city", "max_results", "x1", "_private", "query"), draw.choice((0, 1, 1, 2, 4)))
    return draw.choice(("f", "get_weather", "search2", "Read_File")), {name: draw_value(draw) for name in names}


def draw_calls(draw: random.Random) -> list[Call]:
    """Draw one to four calls."""
    return [draw_call(draw) for _ in range(draw.randint(1, 4))]


def pythonic(calls: Sequence[Call]) -> str:
    """Write the calls in Python syntax."""
    written = (f"{name}({', '.join(f'{key}={value!r}' for key, value in values.items())})" for name, values in calls)
    return f"[{', '.join(written)}]"


def in_array(calls: Sequence[Call]) -> str:
    """Write the calls as a JSON array."""
    return json.dumps([{"name": name, "arguments": values} for name, values in calls])


#: Formats for which no chat template writes calls like its model.
WRITERS: dict[str, Callable[[Sequence[Call]], str]] = {
    "granite": lambda calls: "<|tool_call|>" + in_array(calls),
    "pythonic": pythonic,
    "llama4_pythonic": lambda calls: f"<|python_start|>{pythonic(calls)}<|python_end|>",
}


@dataclass(frozen=True)
class Parsed:
    """Result of a parser.

    Attributes:
        parts: all parts, without ids, which may be random.
        calls: the calls.
        contents: the content before each call and after the last one.
    """

    parts: list[Part]
    calls: list[Call]
    contents: list[str]
    ids: list[str | None]

    @property
    def content(self) -> str:
        """Return all content."""
        return "".join(self.contents)


def parse(parser: str, pieces: Iterable[str]) -> Parsed:
    """Parse text in pieces; check that calls are complete and their arguments JSON objects."""
    reading = tool_parser(parser)(())
    parts: list[Part] = []
    for piece in pieces:
        parts += reading.feed(piece)
    parts = merged([*parts, *reading.end()])
    calls: list[Call] = []
    contents, ids = [""], list[str | None]()
    for index, part in enumerate(parts):
        match part:
            case Content(text):
                contents[-1] += text
            case ToolCallStart(name, id):
                arguments = parts[index + 1]
                assert isinstance(arguments, ToolCallArguments)
                value = json.loads(arguments.text)
                assert isinstance(value, dict)
                calls.append((name, value))
                contents.append("")
                ids.append(id)
    without_ids = [ToolCallStart(part.name) if isinstance(part, ToolCallStart) else part for part in parts]
    return Parsed(without_ids, calls, contents, ids)
