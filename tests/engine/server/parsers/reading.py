"""Results of parsers, independent of how answers are split."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from stoker_engine.server.openai.messages import Tool
from stoker_engine.server.parsers.parser import AnswerParser
from stoker_engine.server.parsers.parts import Content, Part, Reasoning, ToolCallArguments, ToolCallStart, merged
from stoker_engine.server.parsers.registry import reasoning_parser, tool_parser


class Reading:
    """Parsing of answers to one prompt.

    Args:
        reasoning: name of the reasoning parser.
        tools: name of the tool parser.
        offered: tools that may be called.
    """

    def __init__(
        self,
        prompt: str,
        reasoning: str | None = None,
        tools: str | None = None,
        offered: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self._prompt = prompt
        self._reasoning = reasoning
        self._tools = tools
        self._offered = [Tool.model_validate(tool).to_tool() for tool in offered]

    def parser(self) -> AnswerParser:
        """Return a parser for one answer."""
        return AnswerParser(
            None if self._reasoning is None else reasoning_parser(self._reasoning)(self._prompt),
            None if self._tools is None else tool_parser(self._tools)(self._offered),
        )

    def __call__(self, pieces: Iterable[str]) -> list[Part]:
        """Return the parts of an answer that arrives in pieces."""
        parser = self.parser()
        parts = [part for piece in pieces for part in parser.feed(piece)]
        return merged([*parts, *parser.end()])

    def however_cut(self, text: str) -> list[Part]:
        """Return the parts of an answer; check that they do not depend on how it is split."""
        whole = self([text])
        for pieces in cuts(text):
            assert self(pieces) == whole, pieces
        return whole


def cuts(text: str) -> Iterator[Sequence[str]]:
    """Yield the text split into characters, into two pieces, and into triples."""
    yield text
    step = len(text) // 300 + 1
    for at in range(len(text) % step, len(text), step):
        yield text[:at], text[at:]
    yield [text[at : at + 3] for at in range(0, len(text), 3)]


def text_of(parts: Iterable[Part], *kinds: type[Part]) -> str:
    """Return the text of all parts of these kinds."""
    texts = (
        part.text
        for part in parts
        if isinstance(part, (Content, Reasoning, ToolCallArguments)) and isinstance(part, kinds)
    )
    return "".join(texts)


def calls_of(parts: Sequence[Part]) -> list[tuple[str, Any]]:
    """Return the calls among parts; each has a name and arguments."""
    names = [part.name for part in parts if isinstance(part, ToolCallStart)]
    texts = [json.loads(part.text) for part in parts if isinstance(part, ToolCallArguments)]
    return list(zip(names, texts, strict=True))
