"""Calls of DeepSeek V3.1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Final

from stoker_engine.server.parsers.call_text import Reading
from stoker_engine.server.parsers.json_calls import TOOL_NAME, JSONCall, arguments_text, call_name
from stoker_engine.server.parsers.structural_tags import structural_tag
from stoker_engine.server.parsers.tool_use import Tool
from stoker_engine.server.parsers.tools.call_section import CallSectionParser
from stoker_engine.server.parsers.tools.deepseek_v3 import MARKERS

_SEPARATOR: Final = "<｜tool▁sep｜>"


class DeepSeekV31ToolParser(CallSectionParser):
    """``<｜tool▁call▁begin｜>f<｜tool▁sep｜>{…}<｜tool▁call▁end｜>``, in a section."""

    section = MARKERS
    markers: ClassVar[tuple[str, ...]] = (*MARKERS, _SEPARATOR)
    begins = MARKERS.begins()

    def call(self) -> Reading[JSONCall]:
        name = yield from self.text.run(TOOL_NAME)
        yield from self.text.text(_SEPARATOR)
        arguments = yield from self.text.json()
        return JSONCall(call_name(name), arguments_text(arguments))

    @classmethod
    def structural_tag(cls, tools: Sequence[Tool]) -> dict[str, Any]:
        """Return the structural tag that constrains arguments to the tools' schemas."""
        begin = f"{MARKERS.call_begin}NAME{_SEPARATOR}"
        return structural_tag(tools, MARKERS.call_begin, begin, MARKERS.call_end)
