"""Which tools an answer may call, and whether it must: `tools`, `tool_choice` and `parallel_tool_calls`.

Where a call is a must, a grammar makes the whole answer calls, in vLLM's two shapes: one named tool's arguments alone,
or a list of ``{"name": …, "parameters": …}``. Where a model calls by itself, it writes calls as it was trained to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from stoker_common.errors import RequestError
from stoker_engine.server.schema.field_types import StrictModel, or_else
from stoker_engine.server.schema.messages import Tool


class ToolName(StrictModel):
    """The name of a tool."""

    name: str


class NamedToolChoice(StrictModel):
    """This tool is to be called, once."""

    type: Literal["function"] = "function"
    function: ToolName


class AllowedTools(StrictModel):
    """Some of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedToolChoice], Field(min_length=1, fail_fast=True)]


class AllowedToolChoice(StrictModel):
    """Only some of the tools are to be called. The others are not told to the model."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedToolChoice | AllowedToolChoice,
    or_else(
        'must be "none", "auto", "required", {"type": "function", "function": {"name": …}}, or '
        '{"type": "allowed_tools", "allowed_tools": {"mode": …, "tools": […]}}'
    ),
]


@dataclass(frozen=True)
class ToolUse:
    """Which tools an answer may call, and whether it must.

    Attributes:
        tools: those that it may call.
        mode: ``none``: it calls none; ``auto``: the model decides; ``required``: it is made of calls; ``named``: it is
            the arguments of the one tool in `tools`.
        parallel: whether it may hold more than one call.
    """

    tools: tuple[Tool, ...] = ()
    mode: Literal["none", "auto", "required", "named"] = "none"
    parallel: bool = True

    @classmethod
    def of(cls, tools: Sequence[Tool] | None, choice: Any, parallel: bool | None) -> ToolUse:
        """What the three fields ask for, each None where it is left out.

        Raises:
            RequestError: a tool is to be called that there is not, or must conform to what is no object's schema.
        """
        all_tools = tuple(tools or ())
        use = cls(all_tools, "auto" if all_tools else "none", parallel is not False)
        match choice:
            case "none":
                use = replace(use, mode="none", tools=())
            case "required":
                use = replace(use, mode="required")
            case NamedToolChoice():
                use = replace(use, mode="named", tools=_named(all_tools, [choice]), parallel=False)
            case AllowedToolChoice(allowed_tools=allowed):
                use = replace(use, mode=allowed.mode, tools=_named(all_tools, allowed.tools))
        if use.mode == "required" and not all_tools:
            raise RequestError("tool_choice needs tools: there is none to call", "tool_choice")
        if use.is_forced or any(tool.function.strict for tool in use.tools):
            for tool in use.tools:
                arguments_schema(tool)
        return use

    @property
    def is_forced(self) -> bool:
        """Whether the answer is made of calls, as `schema` says."""
        return self.mode in ("required", "named")

    @property
    def schema(self) -> dict[str, Any]:
        """A JSON Schema of the whole answer, where it is forced."""
        if self.mode == "named":
            return arguments_schema(self.tools[0])
        calls = [_call_schema(tool, f"#/items/anyOf/{index}") for index, tool in enumerate(self.tools)]
        schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
        return schema if self.parallel else {**schema, "maxItems": 1}


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """A JSON Schema of the arguments of `tool`, which are an object. Without `parameters`, it takes none.

    Raises:
        RequestError: its `parameters` are not the schema of an object.
    """
    parameters = tool.function.parameters
    if not parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    kind = parameters.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise RequestError(
            f"the parameters of {tool.function.name[:200]!r} must be the JSON Schema of an object", "tools"
        )
    return {**parameters, "type": "object"}


def _named(tools: Sequence[Tool], choices: Sequence[NamedToolChoice]) -> tuple[Tool, ...]:
    by_name = {tool.function.name: tool for tool in tools}
    for choice in choices:
        name = choice.function.name
        if name not in by_name:
            there = ", ".join(by_name)[:500] or "none"
            raise RequestError(f"tool_choice names {name[:200]!r}, but tools has {there}", "tool_choice")
    chosen = {choice.function.name for choice in choices}
    return tuple(tool for name, tool in by_name.items() if name in chosen)


def _call_schema(tool: Tool, pointer: str) -> dict[str, Any]:
    """The schema of a call, which lies at `pointer` within another."""
    parameters = moved(arguments_schema(tool), f"{pointer}/properties/parameters")
    return {
        "type": "object",
        "properties": {"name": {"const": tool.function.name}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


#: What holds values, not schemas: nothing in them is a reference.
_VALUES: Final = frozenset({"const", "default", "enum", "examples"})
#: What maps names to schemas: a name is no keyword.
_NAMED_SCHEMAS: Final = frozenset(
    {"$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"}
)


def moved(schema: Any, pointer: str) -> Any:
    """`schema` as part of another one, at `pointer` in it: references to its own parts lead there.

    A schema with an ``$id`` stays as it is: references in it are relative to that.
    """
    match schema:
        case {"$id": _}:
            return schema
        case Mapping():
            return {key: _moved_value(key, value, pointer) for key, value in schema.items()}
        case list():
            return [moved(each, pointer) for each in schema]
    return schema


def _moved_value(key: str, value: Any, pointer: str) -> Any:
    if key in _VALUES:
        return value
    if key in ("$ref", "$dynamicRef") and isinstance(value, str) and (value == "#" or value.startswith("#/")):
        return pointer + value[1:]
    if key in _NAMED_SCHEMAS and isinstance(value, Mapping):
        return {name: moved(each, pointer) for name, each in value.items()}
    return moved(value, pointer)
