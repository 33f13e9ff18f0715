"""Argument values in plain text → JSON, according to the types of the tool's parameters."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import unquote

from stoker_engine.server.fields.json_text import NotJSONError, parsed
from stoker_engine.server.parsers.tool_use import Tool

_INTEGER: Final = re.compile(r"([+-]?[0-9]+)(?:\.0*)?")
_NUMBER: Final = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_BOOLEANS: Final = {"true": "true", "1": "true", "false": "false", "0": "false"}

#: Python's type names, which some tool descriptions use.
_ALIASES: Final = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "list": "array",
    "dict": "object",
}


def arguments(tools: Sequence[Tool], name: str, values: Mapping[str, str]) -> str:
    """Return the JSON text of the arguments for a call of the tool `name`.

    A value that does not match its parameter's type stays a string, as do values of unknown tools and parameters.
    """
    schema = next((tool.parameters for tool in tools if tool.name == name), None) or {}
    properties = schema.get("properties")
    schemas = properties if isinstance(properties, dict) else {}
    members = [f"{_string(key)}: {_typed(text, _types(schemas.get(key), schema))}" for key, text in values.items()]
    return f"{{{', '.join(members)}}}"


def _typed(text: str, types: set[str]) -> str:
    """Return `text` as JSON of the first matching type, in vLLM's order and by vLLM's rules for each type.

    Templates write ``None`` for null, and models ``5.0`` for an integer.
    """
    stripped = text.strip()
    if "null" in types and (stripped.lower() == "null" or (stripped == "None" and "string" not in types)):
        return "null"
    if "integer" in types and (integer := _INTEGER.fullmatch(stripped)) is not None and len(stripped) < 4000:
        return str(int(integer[1]))
    if "number" in types and _NUMBER.fullmatch(stripped) is not None and math.isfinite(float(stripped)):
        return stripped if _is_json(stripped) else repr(float(stripped))
    if "boolean" in types and stripped.lower() in _BOOLEANS:
        return _BOOLEANS[stripped.lower()]
    if not types.isdisjoint(("object", "array")) and stripped[:1] in ("{", "[") and _is_json(stripped):
        return stripped
    return _string(text)


def _types(schema: Any, root: Mapping[str, Any]) -> set[str]:
    """Return the types that `schema`, a part of `root`, allows; string if it declares none."""
    types: set[str] = set()
    references: set[str] = set()
    pending = [schema]
    while pending:
        schema = pending.pop()
        if not isinstance(schema, dict):
            continue
        declared = schema.get("type")
        for type in declared if isinstance(declared, list) else [declared]:
            if isinstance(type, str):
                types.add(_ALIASES.get(type, type))
        values = schema.get("enum")
        for value in [*(values if isinstance(values, list) else ()), *([schema["const"]] if "const" in schema else ())]:
            types.add(_type_of(value))
        for several in ("anyOf", "oneOf", "allOf"):
            if isinstance(schema.get(several), list):
                pending += schema[several]
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in references:
            references.add(reference)
            pending.append(_referenced(reference, root))
    return types or {"string"}


def _referenced(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the part of `root` to which a JSON pointer refers; None if there is none, or it is external."""
    beginning, *path = unquote(reference).split("/")
    node: Any = root if beginning == "#" else None
    for name in path:
        node = node.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(node, dict) else None
    return node


def _type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def _is_json(text: str) -> bool:
    try:
        parsed(text)
    except NotJSONError:
        return False
    return True


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
