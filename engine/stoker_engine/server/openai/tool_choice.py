"""`tool_choice` in OpenAI's format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from stoker_engine.server.fields.field_types import StrictModel, or_else
from stoker_engine.server.parsers.tool_use import Tool, ToolUse


class ToolName(StrictModel):
    """Name of a tool."""

    name: str


class NamedToolChoice(StrictModel):
    """Names a tool; as `tool_choice`, it forces exactly one call."""

    type: Literal["function"] = "function"
    function: ToolName


class AllowedTools(StrictModel):
    """A subset of the tools, and whether a call is required."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedToolChoice], Field(min_length=1, fail_fast=True)]


class AllowedToolChoice(StrictModel):
    """Restricts calls to some of the tools. The prompt does not contain the others."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedToolChoice | AllowedToolChoice,
    or_else(
        'must be "none", "auto", "required", {"type": "function", "function": {"name": …}}, or '
        '{"type": "allowed_tools", "allowed_tools": {"mode": …, "tools": […]}}'
    ),
]


def requested_tool_use(tools: Sequence[Tool], choice: ToolChoice | None, parallel: bool | None) -> ToolUse:
    """Return the tool use that these fields of a request demand; `choice` and `parallel` are None if unset.

    Raises:
        RequestError: see `ToolUse.of`.
    """
    may_be_parallel = parallel is not False
    match choice:
        case NamedToolChoice():
            return ToolUse.of(tools, "named", [choice.function.name], may_be_parallel)
        case AllowedToolChoice(allowed_tools=allowed):
            names = [each.function.name for each in allowed.tools]
            return ToolUse.of(tools, allowed.mode, names, may_be_parallel)
    return ToolUse.of(tools, choice or "auto", parallel=may_be_parallel)
