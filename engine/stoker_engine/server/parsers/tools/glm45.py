"""Calls of GLM 4.5 and later: XML-like tags."""

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
_KEY_END: Final = Markers("</arg_key>")
_VALUE_END: Final = Markers("</arg_value>")


class Glm45ToolParser(CallParser):
    """Reads ``<tool_call>NAME``, ``<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>`` per argument, ``</tool_call>``.

    GLM 4.5 writes each on a line of its own, GLM 4.7 without white space. Values are plain text without escapes: a
    value ends at the first ``</arg_value>`` before ``<arg_key>`` or ``</tool_call>``.
    """

    markers: ClassVar[tuple[str, ...]] = (
        "<tool_call>",
        "</tool_call>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
    )
    begins = Markers("<tool_call>")

    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__(tools)
        self._tools = tools

    def calls(self, begin: str) -> Reading[None]:
        name = (yield from self.text.run(_NAME)).strip()
        if not name:
            raise NotACallError
        values: dict[str, str] = {}
        yield from self.text.spaces()
        tag = yield from self.text.text("<arg_key>", "</tool_call>")
        while tag == "<arg_key>":
            key, _ = yield from self.text.until(_KEY_END)
            yield from self.text.spaces()
            yield from self.text.text("<arg_value>")
            values[key.strip()], tag = yield from self._value()
        self.text.accept(tool_call(name, arguments(self._tools, name, values)))

    def content_of_no_call(self) -> int:
        return self.text.length()  # values may be long, and are not searched for further calls

    def _value(self) -> Reading[tuple[str, str]]:
        """Read a value and the tag after it."""
        value = ""
        while True:
            text, end = yield from self.text.until(_VALUE_END)
            value += text
            spaces = yield from self.text.run(_SPACES)
            try:
                tag = yield from self.text.text("<arg_key>", "</tool_call>")
            except NotACallError:
                value += end + spaces
            else:
                return value, tag
