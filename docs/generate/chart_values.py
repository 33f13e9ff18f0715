"""The page of the chart's values, from values.yaml with its comments, and from values.schema.json.

The description of a value is the comment right above it; only mappings with documented fields may lack one. Comments
below a value whose text is indented by two spaces are examples.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from markdown_text import code, prose, table

CHART = Path(__file__).resolve().parents[2] / "charts" / "stoker"

_HEAD = """# Chart values

This page is generated from the chart's `values.yaml` and `values.schema.json` (`make generate`). Helm checks values by
the schema when it installs, upgrades, renders or lints the chart; an unknown value is an error.
"""
#: A comment that is an example of a value: its text is indented.
_EXAMPLE = re.compile(r"^ *#  (.*)$")
_COMMENT = re.compile(r"^ *# ?(.*)$")


def page() -> str:
    """Return the page, in Markdown."""
    introduction, tables = parts()
    return f"{_HEAD}\n{introduction}\n\n{tables}"


def parts() -> tuple[str, str]:
    """Return the introduction of values.yaml, and its tables, with headings of level 2.

    Raises:
        SystemExit: a value has no comment.
    """
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    lines, root = text.split("\n"), yaml.compose(text, Loader=yaml.SafeLoader)
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    assert isinstance(root, yaml.MappingNode)
    intro, *_ = text.partition("\n\n")
    sections: dict[str, list[tuple[str, ...]]] = {}
    heads: dict[str, str] = {}
    simple: list[tuple[str, ...]] = []
    for key, node in root.value:
        if not _has_fields(node):
            simple.append(_row(key.value, key, node, lines, schema))
            continue
        heads[key.value] = _comment(lines, key)
        sections[key.value] = list(_rows(key.value, node, lines, schema))
    head = ("value", "type", "default", "meaning")
    tables = ["## Top-level values", "", *table(head, simple)]
    for name, rows in sections.items():
        tables += [f"## {name}", "", *((prose(heads[name]), "") if heads[name] else ()), *table(head, rows)]
    introduction = prose("\n".join(_COMMENT.sub(r"\1", line) for line in intro.split("\n")))
    return introduction, "\n".join(tables).rstrip() + "\n"


def _has_fields(node: yaml.Node) -> bool:
    """Return whether the value is a mapping whose fields the file documents one by one."""
    return isinstance(node, yaml.MappingNode) and not node.flow_style


def _rows(path: str, node: yaml.MappingNode, lines: list[str], schema: Any) -> Iterator[tuple[str, ...]]:
    """Yield a row for each value in a mapping; a mapping inside it has a row if it has a comment."""
    for key, value in node.value:
        name = f"{path}.{key.value}"
        if not _has_fields(value):
            yield _row(name, key, value, lines, schema)
            continue
        if comment := _comment(lines, key):
            yield code(name), "object", "", prose(comment)
        yield from _rows(name, value, lines, schema)


def _row(path: str, key: yaml.Node, node: yaml.Node, lines: list[str], schema: Any) -> tuple[str, ...]:
    default = yaml.safe_load(yaml.serialize(node))
    meaning = prose(_comment(lines, key))
    if not meaning:
        raise SystemExit(f"charts/stoker/values.yaml: {path} has no comment; write one in the line above it")
    if examples := list(_examples(lines, node)):
        meaning = f"{meaning} Example: {', '.join(map(code, examples))}".strip()
    return code(path), _type(_find(schema, path.split(".")), schema), code(json.dumps(default)), meaning


def _comment(lines: list[str], key: yaml.Node) -> str:
    """Return the comment above a key, which has the same indentation."""
    indent = " " * key.start_mark.column + "#"
    found: list[str] = []
    for line in reversed(lines[: key.start_mark.line]):
        if not line.startswith(indent) or _EXAMPLE.match(line):
            break
        found.append(_COMMENT.sub(r"\1", line))
    return "\n".join(reversed(found))


def _examples(lines: list[str], node: yaml.Node) -> Iterator[str]:
    """Yield the lines of the example below a value."""
    for line in lines[node.start_mark.line + 1 :]:
        if not (found := _EXAMPLE.match(line)):
            return
        yield found[1]


def _find(schema: Any, path: list[str]) -> Any:
    """Return the schema of the value at `path`."""
    node = schema
    for name in path:
        node = _resolve(node, schema)
        node = node.get("properties", {}).get(name) or node["additionalProperties"]
    return _resolve(node, schema)


def _resolve(node: Any, schema: Any) -> Any:
    """Follow references; of `allOf` return the first schema, which has the type."""
    while "$ref" in node or "allOf" in node:
        node = node["allOf"][0] if "allOf" in node else schema["definitions"][node["$ref"].rpartition("/")[2]]
    return node


def _type(node: Any, schema: Any) -> str:
    """Return the type of a value in words."""
    if "enum" in node:
        return " | ".join(code(str(word)) for word in node["enum"])
    kinds = node.get("type", "object")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if kinds == ["array"]:
        return f"list of {_type(_resolve(node.get('items', {}), schema), schema)}"
    text = " or ".join(kinds)
    low, high = node.get("minimum"), node.get("maximum")
    if low is None:
        return text
    return f"{text}, {low:,} to {high:,}" if high is not None else f"{text}, at least {low:,}"
