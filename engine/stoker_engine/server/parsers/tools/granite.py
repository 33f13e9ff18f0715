"""Calls of Granite 3."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, ClassVar

from stoker_engine.server.parsers.call_parser import CallParser
from stoker_engine.server.parsers.call_text import Reading
from stoker_engine.server.parsers.json_calls import calls_in_array, read_call
from stoker_engine.server.parsers.markers import Markers
from stoker_engine.server.parsers.structural_tags import structural_tag
from stoker_engine.server.parsers.tool_use import Tool

_TOKEN = "<|tool_call|>"  # since 3.0
_TEXT = "<tool_call>"  # which 3.1 often writes instead


class GraniteToolParser(CallParser):
    """``<|tool_call|>[{"name": "f", "arguments": {…}}, …]``; ``arguments`` may be missing."""

    markers: ClassVar[tuple[str, ...]] = (_TOKEN,)
    begins = Markers(_TOKEN, _TEXT)

    def calls(self, begin: str) -> Reading[None]:
        yield from self.text.spaces()
        yield from calls_in_array(self.text, functools.partial(read_call, default="{}"))

    @classmethod
    def structural_tag(cls, tools: Sequence[Tool]) -> dict[str, Any]:
        """Return the structural tag that constrains arguments to the tools' schemas, and each array to one call."""
        tags = [
            structural_tag(tools, begin, f'{begin}[{{"name": "NAME", "arguments": ', "}]") for begin in (_TOKEN, _TEXT)
        ]
        structures = [structure for tag in tags for structure in tag["structures"]]
        return {"type": "structural_tag", "structures": structures, "triggers": [_TOKEN, _TEXT]}
