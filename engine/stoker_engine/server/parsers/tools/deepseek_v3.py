"""Calls of DeepSeek V3 and R1."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, ClassVar, Final

from stoker_engine.server.parsers.call_text import Reading
from stoker_engine.server.parsers.json_calls import TOOL_NAME, JSONCall, arguments_text, call_name
from stoker_engine.server.parsers.structural_tags import structural_tag
from stoker_engine.server.parsers.tool_use import Tool
from stoker_engine.server.parsers.tools.call_section import CallSectionParser, SectionMarkers

_SEPARATOR: Final = "<｜tool▁sep｜>"
_TYPE: Final = re.compile(r"\w*")

MARKERS: Final = SectionMarkers(
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
)


class DeepSeekV3ToolParser(CallSectionParser):
    r"""``<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{…}\n```<｜tool▁call▁end｜>``, in a section."""

    section = MARKERS
    markers: ClassVar[tuple[str, ...]] = (*MARKERS, _SEPARATOR)
    begins = MARKERS.begins()

    def call(self) -> Reading[JSONCall]:
        yield from self.text.run(_TYPE)
        yield from self.text.text(_SEPARATOR)
        name = yield from self.text.run(TOOL_NAME)
        yield from self.text.spaces()
        yield from self.text.text("```json")
        arguments = yield from self.text.json()
        yield from self.text.closing("```")
        return JSONCall(call_name(name), arguments_text(arguments))

    @classmethod
    def structural_tag(cls, tools: Sequence[Tool]) -> dict[str, Any]:
        """Return the structural tag that constrains arguments to the tools' schemas."""
        begin = f"{MARKERS.call_begin}function{_SEPARATOR}NAME\n```json\n"
        return structural_tag(tools, MARKERS.call_begin, begin, f"\n```{MARKERS.call_end}")
