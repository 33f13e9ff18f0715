"""Arguments whose values are written as plain text → JSON, as the tool's parameters want them."""

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

#: Python's names of types, which tools are described with now and then.
_ALIASES: Final = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "list": "array",
    "dict": "object",
}


def arguments(tools: Sequence[Tool], name: str, values: Mapping[str, str]) -> str:
    """The text of the arguments of a call of the tool `name`.

    A value that does not read as what the tool wants stays a string, as do those of unknown tools and parameters.
    """
    schema = next((tool.parameters for tool in tools if tool.name == name), None) or {}
    properties = schema.get("properties")
    schemas = properties if isinstance(properties, dict) else {}
    members = [f"{_string(key)}: {_typed(text, _types(schemas.get(key), schema))}" for key, text in values.items()]
    return f"{{{', '.join(members)}}}"


def _typed(text: str, types: set[str]) -> str:
    """`text` as JSON of the first of `types` that it reads as; vLLM's order, and what it takes for each of them.

    Templates write ``None`` for null, and ``5.0`` where an integer was meant.
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
    """The types that `schema`, a part of `root`, allows; a string where it does not tell."""
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
    """The part of `root` that a JSON pointer shows; None: there is none, or it shows elsewhere."""
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
