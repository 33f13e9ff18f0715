"""Calls of Llama 3: JSON without markers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from stoker_engine.server.parsers.call_parser import CallParser
from stoker_engine.server.parsers.call_text import Reading
from stoker_engine.server.parsers.json_calls import read_call
from stoker_engine.server.parsers.markers import Markers
from stoker_engine.server.parsers.structural_tags import structural_tag
from stoker_engine.server.parsers.tool_use import Tool

_PYTHON_TAG = "<|python_tag|>"


class Llama3JsonToolParser(CallParser):
    """``{"name": "f", "parameters": {…}}``, also with ``arguments``; several are separated by semicolons.

    ``<|python_tag|>`` may precede them. As in vLLM, any object with a name and arguments is a call, except inside
    another object; other objects are content.
    """

    markers: ClassVar[tuple[str, ...]] = (_PYTHON_TAG,)
    begins = Markers("{", _PYTHON_TAG)
    separators: ClassVar[str] = CallParser.separators + ";"

    def calls(self, begin: str) -> Reading[None]:
        call = yield from self.text.json(begin if begin == "{" else "")
        self.text.accept(read_call(call, ("arguments", "parameters")).parts())

    def content_of_no_call(self) -> int:
        return self.text.length()  # objects within it are no calls

    @classmethod
    def structural_tag(cls, tools: Sequence[Tool]) -> dict[str, Any]:
        """Return the structural tag that constrains arguments to the tools' schemas."""
        return structural_tag(tools, '{"name":', '{"name": "NAME", "parameters": ', "}")
