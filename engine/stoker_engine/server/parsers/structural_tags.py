"""How calls are forced where a model begins one: vLLM's structural tags."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from stoker_engine.server.parsers.tool_use import Tool


def structural_tag(tools: Sequence[Tool], trigger: str, begin: str, end: str) -> dict[str, Any]:
    """After `trigger`, one of the calls; the arguments are a tool's parameters.

    Args:
        begin: what a call begins with; ``NAME`` in it stands for the tool's name, as JSON writes it without quotes.
        end: what follows the arguments.
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
