"""vLLM's structural tags, which constrain the rest of a call that the model has started."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from stoker_engine.server.parsers.tool_use import Tool


def structural_tag(tools: Sequence[Tool], trigger: str, begin: str, end: str) -> dict[str, Any]:
    """Return the tag that makes `trigger` start a call of one of `tools`, with arguments that match the tool's schema.

    Args:
        begin: start of a call; ``NAME`` is replaced by the tool's name, JSON-escaped, without quotes.
        end: text after the arguments.
    """
    structures = [
        {
            "begin": begin.replace("NAME", json.dumps(tool.name, ensure_ascii=False)[1:-1]),
            "schema": tool.parameters or {"type": "object"},
            "end": end,
        }
        for tool in tools
    ]
    return {"type": "structural_tag", "structures": structures, "triggers": [trigger]}
