"""Nested fields of a request: tools, tool choice, text format, reasoning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from stoker_engine.server.fields.field_types import StrictModel, or_else
from stoker_engine.server.fields.unsupported import Absent, Off, OnlyValue
from stoker_engine.server.parsers.tool_use import Tool, ToolUse
from stoker_engine.server.responses.items import of_type


class FunctionTool(StrictModel):
    """A function that the model may call; `parameters` is a JSON Schema."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    allowed_callers: Annotated[Any, OnlyValue(["direct"])] = None
    defer_loading: Off = None
    output_schema: Absent = None

    def echo(self) -> dict[str, Any]:
        """Return the tool as a response repeats it."""
        return self.model_dump(include={"type", "name", "description", "parameters"}) | {"strict": bool(self.strict)}


class FunctionChoice(StrictModel):
    """Names a function; as `tool_choice`, it forces exactly one call."""

    type: Literal["function"]
    name: str


class TextFormat(StrictModel):
    """Any text."""

    type: Literal["text"]


class JSONObjectFormat(StrictModel):
    """Any JSON object."""

    type: Literal["json_object"]


class JSONSchemaFormat(StrictModel):
    """JSON that conforms to a schema."""

    type: Literal["json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class TextConfig(StrictModel):
    """Format of the answer's text."""

    format: (
        Annotated[
            TextFormat | JSONObjectFormat | JSONSchemaFormat,
            of_type("formats", {"text": TextFormat, "json_object": JSONObjectFormat, "json_schema": JSONSchemaFormat}),
        ]
        | None
    ) = None
    verbosity: Annotated[Any, OnlyValue("medium")] = None

    @property
    def constraint(self) -> dict[str, Any]:
        """The constraint as arguments of `StructuredOutputs`; empty for any text."""
        match self.format:
            case JSONObjectFormat():
                return {"json_object": True}
            case JSONSchemaFormat(schema_=schema):
                return {"json": schema}
        return {}


class ReasoningConfig(StrictModel):
    """Reasoning effort. Reasoning is returned as text, without a summary."""

    effort: str | None = None
    summary: Annotated[Any, OnlyValue("auto")] = None
    generate_summary: Annotated[Any, OnlyValue("auto")] = None
    context: Annotated[Any, OnlyValue("auto")] = None
    mode: Annotated[Any, OnlyValue("standard")] = None


class StreamOptions(StrictModel):
    """Streaming options."""

    include_obfuscation: Off = None


class AllowedTools(StrictModel):
    """Restricts calls to some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice], Field(min_length=1, fail_fast=True)]


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | FunctionChoice | AllowedTools,
    or_else(
        'must be "none", "auto", "required", {"type": "function", "name": …}, or '
        '{"type": "allowed_tools", "mode": …, "tools": […]} with functions'
    ),
]


def requested_tool_use(tools: Sequence[Tool], choice: ToolChoice | None, parallel: bool | None) -> ToolUse:
    """Return the tool use that these fields of a request demand; `choice` and `parallel` are None if unset.

    Raises:
        RequestError: see `ToolUse.of`.
    """
    may_be_parallel = parallel is not False
    match choice:
        case FunctionChoice():
            return ToolUse.of(tools, "named", [choice.name], may_be_parallel)
        case AllowedTools():
            return ToolUse.of(tools, choice.mode, [each.name for each in choice.tools], may_be_parallel)
    return ToolUse.of(tools, choice or "auto", parallel=may_be_parallel)
