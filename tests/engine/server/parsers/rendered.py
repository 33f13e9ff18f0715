"""What models generate, by their own chat templates, and what parsers make of it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from stoker_engine.server.openai.messages import Tool
from stoker_engine.server.parsers.parser import AnswerParser
from stoker_engine.server.parsers.parts import Content, Part, Reasoning, ToolCallArguments, merged
from stoker_engine.server.parsers.registry import reasoning_parser, tool_parser
from stoker_engine.tokens import chat_template

TEMPLATES = Path(__file__).parent / "templates"

#: What ends a turn; the tokens are not in a sequence's text.
STOPS = re.compile(
    r"<\|(?:im_end|observation|user|return|call|role_end|end_of_text|eot_id)\|>|<｜end▁of▁sentence｜>|</s>"
)


def template(name: str) -> str:
    """A chat template."""
    return (TEMPLATES / f"{name}.jinja").read_text()


def prompt(name: str, tools: Sequence[Mapping[str, Any]] | None = None, user: str = "Well?", **variables: Any) -> str:
    """The prompt of a chat that has begun."""
    return chat_template.render(
        template(name), [{"role": "user", "content": user}], tools=tools, variables={"bos_token": "", **variables}
    )


def answer(
    name: str,
    content: str = "",
    reasoning: str | None = None,
    calls: Iterable[tuple[str, Mapping[str, Any]]] = (),
    tools: Sequence[Mapping[str, Any]] | None = None,
    **variables: Any,
) -> tuple[str, str]:
    """The prompt, and what the model would generate after it."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    written = [
        {"id": f"functions.{function}:{i}", "type": "function", "function": {"name": function, "arguments": arguments}}
        for i, (function, arguments) in enumerate(calls)
    ]
    if written:
        message["tool_calls"] = written
    before = prompt(name, tools, **variables)
    chat = chat_template.render(
        template(name),
        [{"role": "user", "content": "Well?"}, message],
        tools=tools,
        add_generation_prompt=False,
        variables={"bos_token": "", **variables},
    )
    assert chat.startswith(before), (before[-60:], chat[len(before) - 60 :])
    ends = list(STOPS.finditer(chat, len(before)))
    return before, chat[len(before) : ends[-1].start() if ends else None].removesuffix("\n" if ends else "")


class Reading:
    """How answers to one prompt are read.

    Args:
        reasoning: the name of the parser of reasoning.
        tools: that of the parser of calls.
        offered: the tools that may be called.
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
        self._offered = [Tool.model_validate(tool) for tool in offered]

    def parser(self) -> AnswerParser:
        """A parser for one answer."""
        return AnswerParser(
            None if self._reasoning is None else reasoning_parser(self._reasoning)(self._prompt),
            None if self._tools is None else tool_parser(self._tools)(self._offered),
        )

    def __call__(self, pieces: Iterable[str]) -> list[Part]:
        """The parts of an answer that comes in pieces."""
        parser = self.parser()
        parts = [part for piece in pieces for part in parser.feed(piece)]
        return merged([*parts, *parser.end()])

    def however_cut(self, text: str) -> list[Part]:
        """The parts of an answer, which do not depend on where it is cut."""
        whole = self([text])
        for pieces in cuts(text):
            assert self(pieces) == whole, pieces
        return whole


def cuts(text: str) -> Iterator[Sequence[str]]:
    """The text in characters, in two pieces, in threes."""
    yield text
    step = len(text) // 300 + 1
    for at in range(len(text) % step, len(text), step):
        yield text[:at], text[at:]
    yield [text[at : at + 3] for at in range(0, len(text), 3)]


def said(parts: Iterable[Part], *kinds: type[Part]) -> str:
    """All text of parts of these kinds."""
    texts = (
        part.text
        for part in parts
        if isinstance(part, (Content, Reasoning, ToolCallArguments)) and isinstance(part, kinds)
    )
    return "".join(texts)
