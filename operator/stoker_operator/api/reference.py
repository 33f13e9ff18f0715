"""Generates the reference page of the resource from its schema: the text of `kubectl explain` on one page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any]

_HEAD = """# {kind}

`{group}/{version}`, short name `{short}`. This page is generated from the models in `operator/stoker_operator/api`
(`stoker crd --reference`); `kubectl explain {short}.spec` shows the same texts in a terminal.

`Absent:` introduces the meaning of an absent field. Defaults are never written into the object, except
`spec.replicas: 1`.
"""


def reference(crd: Schema) -> str:
    """Return the page for a CustomResourceDefinition, in Markdown."""
    spec = crd["spec"]
    version = spec["versions"][0]
    names = spec["names"]
    head = _HEAD.format(kind=names["kind"], group=spec["group"], version=version["name"], short=names["shortNames"][0])
    properties = version["schema"]["openAPIV3Schema"]["properties"]
    parts = [head]
    for part in ("spec", "status"):
        parts += [_section(path, node) for path, node in _objects(part, properties[part])]
    return "\n".join(parts)


def _objects(path: str, node: Schema) -> Iterator[tuple[str, Schema]]:
    """Yield `node` and the objects inside it that have properties, in pre-order, each with its path."""
    if "properties" not in node:
        return
    yield path, node
    for name, field in node["properties"].items():
        if "items" in field:
            yield from _objects(f"{path}.{name}[]", field["items"])
        else:
            yield from _objects(f"{path}.{name}", field)


def _section(path: str, node: Schema) -> str:
    lines = [f"## {path}", ""]
    if "description" in node:
        lines += [node["description"], ""]
    lines += ["| field | type | meaning |", "|---|---|---|"]
    needed = node.get("required", ())
    for name, field in sorted(node["properties"].items(), key=lambda item: item[0] not in needed):
        required = ", required" if name in needed else ""
        lines.append(f"| `{name}` | {_type(field)}{required} | {_cell(field.get('description', ''))} |")
    rules = node.get("x-kubernetes-validations", ())
    if rules:
        lines += ["", "Refused:", ""]
        lines += [f"- {_subject(rule)}{rule['message']}." for rule in rules]
    return "\n".join([*lines, ""])


def _subject(rule: Schema) -> str:
    return f"`{rule['fieldPath'][1:]}`: " if "fieldPath" in rule else ""


def _type(node: Schema) -> str:
    """Return the type of a field in words."""
    if node.get("x-kubernetes-int-or-string"):
        return "integer or string"
    if "enum" in node:
        return " \\| ".join(f"`{word}`" if word else '`""`' for word in node["enum"])
    if "items" in node:
        return f"list of {_type(node['items'])}"
    if "additionalProperties" in node:
        return f"map of {_type(node['additionalProperties'])}"
    kind = str(node["type"])
    if kind not in ("integer", "number"):
        return kind
    low, high = node.get("minimum"), node.get("maximum")
    if low is not None and high is not None:
        return f"{kind}, {low} to {high}"
    return f"{kind}, at least {low}" if low is not None else kind


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
