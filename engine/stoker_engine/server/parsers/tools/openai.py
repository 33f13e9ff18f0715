"""Calls of gpt-oss."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, ClassVar, Final

from stoker_common.errors import RequestError
from stoker_engine.server.fields.json_text import NotJSONError, parsed
from stoker_engine.server.parsers import harmony
from stoker_engine.server.parsers.parts import Content, Part, tool_call
from stoker_engine.server.parsers.tool_use import Tool

_FUNCTIONS: Final = "functions."


class OpenAIToolParser:
    """Harmony's messages to ``functions.NAME`` on any channel, or to the name alone if a tool has that name.

    The reasoning parser ``openai_gptoss`` passes them on. Without it, this parser reads all messages itself; messages
    that are neither answer nor call are content as written.
    """

    markers: ClassVar[tuple[str, ...]] = harmony.MARKERS

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._names = {tool.name for tool in tools}
        self._reader = harmony.HarmonyReader()
        self._header: harmony.Header | None = None
        self._arguments: list[str] = []
        self._breaks = False  # whether the next text of an answer starts a new line
        self._answered = False

    @classmethod
    def forced_call(cls, tools: Sequence[Tool]) -> dict[str, Any]:
        """Return the format of optional reasoning and then a call.

        The channel of the call is fixed: with a free choice, the model could write an answer instead.

        Raises:
            RequestError: a tool name is not allowed in a header.
        """
        for tool in tools:
            if re.search(r"[\s<]", tool.name):
                raise RequestError(
                    f"this model cannot be forced to call {tool.name[:200]!r}: the name must not contain spaces or <",
                    "tools",
                )
        call = f"{harmony.CHANNEL}commentary to={_FUNCTIONS}NAME {harmony.CONSTRAIN}json{harmony.MESSAGE}"
        calls = [
            {
                "type": "tag",
                "begin": call.replace("NAME", tool.name),
                "content": {"type": "json_schema", "json_schema": tool.parameters or {"type": "object"}},
                "end": "",
            }
            for tool in tools
        ]
        thought = {
            "type": "tag",
            "begin": f"{harmony.CHANNEL}analysis{harmony.MESSAGE}",
            "content": {"type": "any_text"},
            "end": "<|end|>",
        }
        next_message = {"type": "const_string", "value": harmony.OPENING}
        reasoning = {"type": "star", "content": {"type": "sequence", "elements": [thought, next_message]}}
        return {"type": "sequence", "elements": [reasoning, {"type": "or", "elements": calls}]}

    def feed(self, text: str) -> list[Part]:
        """Return `Content` and calls of the next piece of text."""
        return self._parts(self._reader.feed(text))

    def end(self) -> list[Part]:
        """End the output and return what was held back; the token that ends a call also ends the sequence."""
        return self._parts(self._reader.end())

    def _parts(self, events: Sequence[harmony.Event]) -> list[Part]:
        parts: list[Part] = []
        for event in events:
            match event:
                case harmony.Header():
                    self._header = event
                    self._breaks = self._answered
                    if not event.is_answer and self._name() is None:
                        parts.append(Content(event.written))
                case harmony.Text():
                    parts += self._text(event.text)
                case harmony.End():
                    parts += self._end(event.text)
        return parts

    def _text(self, text: str) -> list[Part]:
        if self._name() is not None:
            self._arguments.append(text)
            return []
        if self._header is not None and self._header.is_answer:
            self._answered = True
            if self._breaks:
                self._breaks = False
                return [Content("\n" + text)]
        return [Content(text)]

    def _end(self, marker: str) -> list[Part]:
        header, name, arguments = self._header, self._name(), "".join(self._arguments)
        self._header, self._arguments = None, []
        if header is None or header.is_answer:
            return []
        if name is None:
            return [Content(marker)]
        try:
            if isinstance(parsed(arguments), dict):
                return tool_call(name, arguments.strip())
        except NotJSONError:
            pass
        return [Content(header.written + arguments + marker)]

    def _name(self) -> str | None:
        """Return the name of the tool that the message calls, or None."""
        if self._header is None or self._header.role != "assistant" or (to := self._header.recipient) is None:
            return None
        if to.startswith(_FUNCTIONS) and to != _FUNCTIONS:
            return to.removeprefix(_FUNCTIONS)
        return to if to in self._names else None
