"""The generated CRD: structural, documented, and equal to the one in the repository."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stoker_engine.contract.names import KV_CACHE_DTYPES
from stoker_operator.api.reference import reference
from stoker_operator.api.v1alpha1.crd import crd
from stoker_operator.cli.crd import main

ROOT = Path(__file__).parents[3]
FILES = ("crds/inferenceendpoints.stoker.dev.yaml", "charts/stoker/files/inferenceendpoints.stoker.dev.yaml")

REFERENCE = "docs/reference/inferenceendpoint.md"


def schema() -> dict[str, Any]:
    found: dict[str, Any] = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return found


def nodes(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the schema of every field with its path."""
    yield path, node
    for name, field in node.get("properties", {}).items():
        yield from nodes(field, f"{path}.{name}")
    for inner in ("items", "additionalProperties"):
        if inner in node:
            yield from nodes(node[inner], f"{path}[]")


def test_generated_files_are_up_to_date(capsys: Any) -> None:
    for file in FILES:
        assert main(["--check", "--output", str(ROOT / file)]) == 0, capsys.readouterr().err
    assert main(["--check", "--reference", str(ROOT / REFERENCE)]) == 0, capsys.readouterr().err


def test_the_reference_has_every_field() -> None:
    page = reference(crd())
    for path, node in nodes(schema()):
        top, _, name = path.rpartition(".")
        if path.startswith((".spec.", ".status.")) and not path.endswith("[]"):
            section = page.split(f"\n## {top[1:]}\n")[1].split("\n## ")[0]
            (row,) = [line for line in section.splitlines() if line.startswith(f"| `{name}` |")]
            assert node["description"].replace("|", "\\|") in row


def test_stale_file_is_reported(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "crd.yaml").write_text("old")
    assert main(["--check", "--output", str(tmp_path / "crd.yaml")]) == 1
    assert "is stale; run `make generate`" in capsys.readouterr().err


def test_every_field_has_a_description() -> None:
    for path, node in nodes(schema()):
        if path and not path.endswith("[]") and not path.startswith(".metadata"):
            assert node.get("description"), path


def test_all_fields_are_bounded_so_that_rules_stay_cheap() -> None:
    for path, node in nodes(schema()["properties"]["spec"]):
        if node.get("type") == "string":
            assert "maxLength" in node or "enum" in node, path
        if node.get("type") == "array":
            assert "maxItems" in node, path
        if "additionalProperties" in node:
            assert "maxProperties" in node, path


def test_schema_has_no_defaults_except_replicas() -> None:
    defaults = [path for path, node in nodes(schema()) if "default" in node]
    assert defaults == [".spec.replicas"]  # the scale subresource needs it


def test_rules_refer_to_existing_fields() -> None:
    at = dict(nodes(schema()))
    for path, node in at.items():
        for rule in node.get("x-kubernetes-validations", ()):
            assert path + rule.get("fieldPath", "") in at
            assert rule["message"]


#: Used functions of https://kubernetes.io/docs/reference/using-api/cel, as of Kubernetes 1.31.
CEL_1_31 = {
    "has", "all", "exists", "filter", "map", "size", "matches", "startsWith", "format", "indexOf", "max", "string",
    "double", "quantity", "compareTo", "isCIDR", "cidr", "masked", "ip", "containsIP", "prefixLength",
}  # fmt: skip


def test_rules_use_only_functions_of_kubernetes_1_31() -> None:
    for path, node in nodes(schema()):
        for rule in node.get("x-kubernetes-validations", ()):
            for expression in (rule["rule"], rule.get("messageExpression", "")):
                code = re.sub(r"r?'[^']*'", "''", expression)
                assert set(re.findall(r"([A-Za-z_]\w*)\(", code)) <= CEL_1_31, path


def test_schema_enums_equal_the_engines_values() -> None:
    engine = schema()["properties"]["spec"]["properties"]["engine"]["properties"]
    assert engine["kvCacheDtype"]["enum"] == list(KV_CACHE_DTYPES)
    assert engine["dtype"]["enum"] == ["auto", "float32", "bfloat16", "float16"]
