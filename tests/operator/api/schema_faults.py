"""Valid specs with one field changed to be wrong, in every way that the schema knows."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

from .spec_cases import (
    RIGHT,
    Path,
    Schema,
    Spec,
    Wrong,
)


def generated(schema: Schema) -> Iterator[Wrong]:
    """Yield every field of the spec's `schema`, wrong in every way; each in a valid spec that has the field."""
    seen = set()
    for right in RIGHT.values():
        for path, node in fields(schema, right):
            name = dotted(path, index=False)
            if name in seen:
                continue
            seen.add(name)
            for how, change in _faults(node, at(right, path)):
                wrong = copy.deepcopy(right)
                blamed = change(wrong, path)
                yield Wrong(f"{name} {how}", wrong, dotted(blamed))


def fields(schema: Schema, value: Any, path: Path = ()) -> Iterator[tuple[Path, Schema]]:
    """Yield the fields of `value`, with the schema of each."""
    if path:
        yield path, schema
    if "properties" in schema:
        for name in schema["properties"].keys() & value.keys():
            yield from fields(schema["properties"][name], value[name], (*path, name))
    elif "additionalProperties" in schema:
        for name in value:
            yield from fields(schema["additionalProperties"], value[name], (*path, name))
    elif "items" in schema:
        for index, item in enumerate(value):
            yield from fields(schema["items"], item, (*path, index))


def at(spec: Any, path: Path) -> Any:
    """Return the value at `path`."""
    for step in path:
        spec = spec[step]
    return spec


def dotted(path: Path, *, index: bool = True) -> str:
    """Format `path` as both validators write it; without indices it names the field of the schema."""
    text = "spec"
    for step in path:
        text += f"[{step if index else ''}]" if isinstance(step, int) else f".{step}"
    return text


# A fault changes a spec at a path, and returns the path of the expected error.
def _put(value: Any) -> Any:
    def change(spec: Spec, path: Path) -> Path:
        at(spec, path[:-1])[path[-1]] = value
        return path

    return change


def _remove(name: str) -> Any:
    def change(spec: Spec, path: Path) -> Path:
        del at(spec, path)[name]
        return (*path, name)

    return change


def _add(name: str) -> Any:
    def change(spec: Spec, path: Path) -> Path:
        at(spec, path)[name] = "x"
        return (*path, name)

    return change


def _faults(node: Schema, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield every way to make a field with this value wrong."""
    for kind, other in _OTHER_TYPES.items():
        types = node.get("type") or ("integer", "string")
        if kind not in types and not (kind == "integer" and types == "number"):
            yield f"is {kind}", _put(other)
    if "minimum" in node:
        yield "is too small", _put(node["minimum"] - 1)
    if "maximum" in node:
        yield "is too large", _put(node["maximum"] + 1)
    if "enum" in node:
        yield "is no such word", _put("no-such-word")
    if "pattern" in node:
        yield "has another pattern", _put(_mismatch(node["pattern"]))
    if node.get("minLength"):
        yield "is empty", _put("")
    if "maxLength" in node and "enum" not in node:
        yield "is too long", _put("a" * (node["maxLength"] + 1))
    if node.get("minItems"):
        yield "has no items", _put([])
    if "maxItems" in node:
        yield "has too many items", _put(list(_items(value[0], node["maxItems"] + 1)))
    if "maxProperties" in node:
        filler = next(iter(value.values()))
        yield "has too many entries", _put({f"key-{number}": filler for number in range(node["maxProperties"] + 1)})
    if node.get("x-kubernetes-list-type") in ("map", "set"):
        yield "has something twice", _put([value[0], value[0]])
    for name in node.get("required", ()):
        yield f"lacks {name}", _remove(name)
    if "properties" in node:
        yield "has an unknown field", _add("noSuchField")


_OTHER_TYPES: dict[str, Any] = {
    "boolean": True,
    "integer": 7,
    "number": 1.5,
    "string": "text",
    "array": ["text"],
    "object": {"text": "text"},
}


def _mismatch(pattern: str) -> str:
    """Return text that `pattern` does not match."""
    return next(text for text in ("!", " ", "\n") if not re.search(pattern, text))


def _items(item: Any, count: int) -> Iterator[Any]:
    """Yield `count` different items like `item`."""
    for number in range(count):
        if isinstance(item, dict) and "name" in item:
            yield {**item, "name": f"n{number}"}
        else:
            yield f"{item}{number}" if isinstance(item, str) else copy.deepcopy(item)
