"""Converts pydantic's JSON schema to the structural schema of a CustomResourceDefinition.

A structural schema is a tree without references and without alternatives that change the type. References are therefore
inlined, and "or null" is dropped (the API server prunes nulls). A default in the schema would be written into stored
objects, so Python's defaults are dropped: the meaning of an absent field can change with a release. A field that needs
a stored default has ``x-default``.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

Schema = dict[str, Any]

#: Keys that are copied unchanged from the JSON schema.
_KEPT = (
    "type", "format", "enum", "pattern", "minimum", "maximum", "minLength", "maxLength",
    "minItems", "maxItems", "minProperties", "maxProperties", "required",
)  # fmt: skip


def structural(model: type[BaseModel]) -> Schema:
    """Return the structural schema of `model`."""
    schema = model.model_json_schema()
    return _convert(schema, schema.get("$defs", {}))


def _convert(node: Schema, defs: Schema) -> Schema:
    if "$ref" in node:
        # The field's own description takes precedence over that of its type.
        node = {**defs[node["$ref"].rpartition("/")[2]], **{k: v for k, v in node.items() if k != "$ref"}}
    alternatives = [option for option in node.get("anyOf", ()) if option.get("type") != "null"]
    siblings = {key: value for key, value in node.items() if key != "anyOf"}
    if node.get("x-kubernetes-int-or-string"):
        return _int_or_string(siblings, alternatives)
    if len(alternatives) == 1:
        return _convert({**alternatives[0], **siblings}, defs)
    assert not alternatives, f"a structural schema has no alternatives: {node}"

    result: Schema = {}
    if "description" in node:
        result["description"] = " ".join(node["description"].split())
    result |= {key: node[key] for key in _KEPT if key in node}
    if "const" in node:
        result["enum"] = [node["const"]]
    if "x-default" in node:
        result["default"] = node["x-default"]
    if "items" in node:
        result["items"] = _convert(node["items"], defs)
    if isinstance(node.get("additionalProperties"), dict):
        result["additionalProperties"] = _convert(node["additionalProperties"], defs)
    if "properties" in node:
        result["properties"] = {name: _convert(field, defs) for name, field in node["properties"].items()}
    result |= {key: value for key, value in node.items() if key.startswith("x-kubernetes-")}
    return result


def _int_or_string(node: Schema, alternatives: list[Schema]) -> Schema:
    result: Schema = {"description": " ".join(node["description"].split())} if "description" in node else {}
    result["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    # Bounds of a number do not apply to strings, and vice versa, so the node can have both.
    for option in alternatives:
        result |= {key: option[key] for key in _KEPT if key in option and key != "type"}
    return result | {"x-kubernetes-int-or-string": True}
