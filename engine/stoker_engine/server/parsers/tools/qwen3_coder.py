"""Calls of Qwen3-Coder, Qwen 3.5 and Nemotron 3: XML-like tags."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar, Final

from stoker_engine.server.parsers.call_parser import CallParser
from stoker_engine.server.parsers.call_text import NotACallError, Reading
from stoker_engine.server.parsers.markers import Markers
from stoker_engine.server.parsers.parts import tool_call
from stoker_engine.server.parsers.tool_use import Tool
from stoker_engine.server.parsers.typed_values import arguments

_NAME: Final = re.compile(r"[^<>\n]*")
_SPACES: Final = re.compile(r"\s*")
_VALUE_END: Final = Markers("</parameter>")


class Qwen3CoderToolParser(CallParser):
    """Reads ``<tool_call><function=NAME>``, ``<parameter=KEY>VALUE</parameter>`` per argument, and the closing tags.

    Models write each tag on a line of its own. Values are plain text without escapes: a value ends at the first
    ``</parameter>`` that is followed, after optional whitespace, by ``<parameter=`` or ``</function>``. The
    ``tool_call`` tags are optional, as in vLLM, because models sometimes omit them.
    """

    markers: ClassVar[tuple[str, ...]] = ("<tool_call>", "</tool_call>")
    begins = Markers("<tool_call>", "<function=")

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__(tools)
        self._tools = tools

    def calls(self, begin: str) -> Reading[None]:
        if begin == "<tool_call>":
            yield from self.text.spaces()
            yield from self.text.text("<function=")
        name = yield from self._name()
        values: dict[str, str] = {}
        yield from self.text.spaces()
        tag = yield from self.text.text("<parameter=", "</function>")
        while tag == "<parameter=":
            key = yield from self._name()
            values[key], tag = yield from self._value()
        self.text.accept(tool_call(name, arguments(self._tools, name, values)))
        yield from self.text.closing("</tool_call>")
        self.text.accept([])

    def content_of_no_call(self) -> int:
        return self.text.length()  # values may be long, and are not searched for further calls

    def _name(self) -> Reading[str]:
        name = yield from self.text.run(_NAME)
        yield from self.text.text(">")
        if not name.strip():
            raise NotACallError
        return name.strip()

    def _value(self) -> Reading[tuple[str, str]]:
        """Read a value and the tag after it."""
        value = ""
        while True:
            text, end = yield from self.text.until(_VALUE_END)
            value += text
            spaces = yield from self.text.run(_SPACES)
            try:
                tag = yield from self.text.text("<parameter=", "</function>")
            except NotACallError:
                value += end + spaces
            else:
                return value.removeprefix("\n").removesuffix("\n"), tag
