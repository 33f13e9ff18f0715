"""Calls of Kimi K2."""

from __future__ import annotations

import re
from typing import ClassVar, Final

from stoker_engine.server.parsers.call_text import NotACallError, Reading
from stoker_engine.server.parsers.json_calls import TOOL_NAME, JSONCall, arguments_text
from stoker_engine.server.parsers.tools.call_section import CallSectionParser, SectionMarkers

_MARKERS: Final = SectionMarkers(
    "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>"
)
_ARGUMENTS: Final = "<|tool_call_argument_begin|>"
_ID: Final = re.compile(r"(?:functions\.)?(?P<name>.+):\d+")


class KimiK2ToolParser(CallSectionParser):
    """``<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{…}<|tool_call_end|>``, in a section.

    ``functions.f:0`` is also the call's id, by which the model refers to it.
    """

    section = _MARKERS
    markers: ClassVar[tuple[str, ...]] = (*_MARKERS, _ARGUMENTS)
    begins = _MARKERS.begins()

    @staticmethod
    def new_call_id(name: str, call_index: int) -> str:
        """Return the id that the model would give to the call with index `call_index` of a conversation."""
        return f"functions.{name}:{call_index}"

    def call(self) -> Reading[JSONCall]:
        yield from self.text.spaces()
        id = yield from self.text.run(TOOL_NAME)
        yield from self.text.spaces()
        yield from self.text.text(_ARGUMENTS)
        if (named := _ID.fullmatch(id)) is None:
            raise NotACallError
        arguments = yield from self.text.json()
        return JSONCall(named["name"], arguments_text(arguments), id)
