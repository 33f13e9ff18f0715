"""Calls of Hermes and Qwen: JSON between tags."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from stoker_engine.server.parsers.call_parser import CallParser
from stoker_engine.server.parsers.call_text import Reading
from stoker_engine.server.parsers.json_calls import read_call
from stoker_engine.server.parsers.markers import Markers
from stoker_engine.server.parsers.structural_tags import structural_tag
from stoker_engine.server.parsers.tool_use import Tool

_BEGIN, _END = "<tool_call>", "</tool_call>"


class HermesToolParser(CallParser):
    """``<tool_call>{"name": "f", "arguments": {…}}</tool_call>``, a pair of tags for each call."""

    markers: ClassVar[tuple[str, ...]] = (_BEGIN, _END)
    begins = Markers(_BEGIN)

    def calls(self, begin: str) -> Reading[None]:
        call = yield from self.text.json()
        yield from self.text.closing(_END)
        self.text.accept(read_call(call).parts())

    @classmethod
    def structural_tag(cls, tools: Sequence[Tool]) -> dict[str, Any]:
        """Return the structural tag that constrains arguments to the tools' schemas."""
        return structural_tag(tools, _BEGIN, f'{_BEGIN}\n{{"name": "NAME", "arguments": ', f"}}\n{_END}")
