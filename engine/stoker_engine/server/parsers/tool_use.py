"""Which tools an answer may call, and whether it must call one.

Voluntary calls are in the model's own format, and so are forced calls if the tool parser has a method ``forced_call``.
Other forced calls follow a grammar for the whole answer, in vLLM's two formats: the arguments of one named tool, or a
list of ``{"name": …, "parameters": …}``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from stoker_common.errors import RequestError

ToolMode = Literal["none", "auto", "required", "named"]


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    Attributes:
        parameters: JSON Schema of its arguments.
        strict: whether the client wants voluntary calls constrained to that schema.
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False

    def for_template(self) -> dict[str, Any]:
        """Return the tool in the form that chat templates expect."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


@dataclass(frozen=True)
class ToolUse:
    """Which tools an answer may call, and whether it must call one.

    Attributes:
        tools: the tools that it may call.
        mode: ``none``: no calls; ``auto``: the model decides; ``required``: the answer consists of calls; ``named``: it
            consists of the arguments of the only tool in `tools`.
        parallel: whether it may contain more than one call.
    """

    tools: tuple[Tool, ...] = ()
    mode: ToolMode = "none"
    parallel: bool = True

    @classmethod
    def of(
        cls, tools: Sequence[Tool], mode: ToolMode = "auto", names: Sequence[str] | None = None, parallel: bool = True
    ) -> ToolUse:
        """Return the tool use of an answer to a request with `tools`.

        Args:
            mode: ``auto`` becomes ``none`` if there are no tools.
            names: tools that it may call; None for all.
            parallel: whether it may contain more than one call.

        Raises:
            RequestError: a call is required without tools; a named tool does not exist; or calls are forced or a tool
                is strict, and a schema is not an object's.
        """
        callable_tools = tuple(tools) if names is None else _named(tools, names)
        if mode == "required" and not tools:
            raise RequestError("tool_choice requires tools, and the request has none", "tool_choice")
        if mode == "none" or not tools:
            return cls((), "none", parallel)
        use = cls(callable_tools, mode, parallel and mode != "named")
        if use.is_forced or any(tool.strict for tool in use.tools):
            for tool in use.tools:
                arguments_schema(tool)
        return use

    @property
    def is_forced(self) -> bool:
        """Whether the answer must consist of calls."""
        return self.mode in ("required", "named")

    @property
    def schema(self) -> dict[str, Any]:
        """JSON Schema of the complete answer, for forced calls in vLLM's formats."""
        if self.mode == "named":
            return arguments_schema(self.tools[0])
        calls = [_call_schema(tool, f"#/items/anyOf/{index}") for index, tool in enumerate(self.tools)]
        schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
        return schema if self.parallel else {**schema, "maxItems": 1}


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """Return the JSON Schema of a tool's arguments, an object. A tool without `parameters` takes no arguments.

    Raises:
        RequestError: the tool's `parameters` are not the schema of an object.
    """
    if not tool.parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    kind = tool.parameters.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise RequestError(f"the parameters of {tool.name[:200]!r} must be the JSON Schema of an object", "tools")
    return {**tool.parameters, "type": "object"}


def _named(tools: Sequence[Tool], names: Sequence[str]) -> tuple[Tool, ...]:
    by_name = {tool.name: tool for tool in tools}
    for name in names:
        if name not in by_name:
            there = ", ".join(by_name)[:500] or "none"
            raise RequestError(f"tool_choice names {name[:200]!r}, which is not in tools: {there}", "tool_choice")
    chosen = set(names)
    return tuple(tool for name, tool in by_name.items() if name in chosen)


def _call_schema(tool: Tool, pointer: str) -> dict[str, Any]:
    """Return the schema of a call, which is embedded at `pointer` in another schema."""
    parameters = moved(arguments_schema(tool), f"{pointer}/properties/parameters")
    return {
        "type": "object",
        "properties": {"name": {"const": tool.name}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


#: Keywords whose values are no schemas, so that they contain no references.
_VALUES: Final = frozenset({"const", "default", "enum", "examples"})
#: Keywords that map names to schemas; the names are no keywords.
_NAMED_SCHEMAS: Final = frozenset(
    {"$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"}
)


def moved(schema: Any, pointer: str) -> Any:
    """Return `schema` with its local references adjusted to its position `pointer` in another schema.

    A schema with an ``$id`` is unchanged, because its references are relative to the ``$id``.
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
