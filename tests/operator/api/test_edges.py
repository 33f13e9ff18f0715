"""Values at the edges of the schema, for every field, are read, and planned or refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker_operator.api.manifest import read
from stoker_operator.api.v1alpha1.crd import crd
from stoker_operator.api.violation import Refused
from stoker_operator.objects.facts import Child
from stoker_operator.objects.owner import Owner
from stoker_operator.plan.catalogue import Catalogue
from stoker_operator.reconcile.drift import differs
from stoker_operator.reconcile.evaluate import PlanningContext, evaluate

from .schema_faults import at, dotted, fields
from .spec_cases import RIGHT

SCHEMA = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
OWNER = Owner("a", "default", "uid")
#: Beyond the bounds of all numbers in the schema.
FAR = 2**63 - 1
#: Quantities that would take a naive parser very long, or crash it.
QUANTITIES = ("0", "1e999999", "1e99999999", "1e-99999999", "9" * 64, "1e" + "9" * 62, ".5", "5.", "1n", "9E", "9Ei")


def edges(node: dict[str, Any], value: Any) -> st.SearchStrategy[Any]:
    """Return values at the edges of what `node` allows, for a field with this value."""
    if "enum" in node:
        return st.sampled_from(node["enum"])
    if node.get("x-kubernetes-int-or-string"):
        texts = st.from_regex(node["pattern"], fullmatch=True).map(str.strip)
        return st.one_of(st.sampled_from((*QUANTITIES, 0, FAR)), texts)
    kind = node.get("type")
    if kind == "integer":
        return st.sampled_from((node.get("minimum", -FAR), node.get("maximum", FAR)))
    if kind == "number":
        return st.sampled_from((node.get("minimum", -1e308), node.get("maximum", 1e308), 5e-324))
    if kind == "boolean":
        return st.booleans()
    if kind == "string" and "pattern" in node:
        return st.from_regex(node["pattern"], fullmatch=True).map(lambda text: text[: node["maxLength"]])
    if kind == "string":
        return st.text(min_size=node.get("minLength", 0), max_size=8) | st.just("x" * node["maxLength"])
    if kind == "array":
        return st.sampled_from([value[:0], value])
    if "additionalProperties" in node and value:
        filler = next(iter(value.values()))
        full = {f"key-{number}": filler for number in range(node["maxProperties"])}
        return st.sampled_from([{}, full])
    return st.sampled_from([{}, value])


def _fields_with_edges() -> Iterator[tuple[str, Any, Any]]:
    seen = set()
    for name, right in RIGHT.items():
        for path, node in fields(SCHEMA, right):
            field = dotted(path, index=False)
            if field not in seen and "enum" not in node:
                seen.add(field)
                yield name, path, node


EDGES = tuple(_fields_with_edges())


@settings(
    max_examples=600, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(field=st.sampled_from(EDGES), data=st.data())
def test_edge_values_of_every_field_are_planned_or_refused(catalogue: Catalogue, field: Any, data: Any) -> None:
    name, path, node = field
    spec = copy.deepcopy(RIGHT[name])
    spec.setdefault("engine", {}).setdefault("image", "mine:1")
    at(spec, path[:-1])[path[-1]] = data.draw(edges(node, at(spec, path)), label=dotted(path))
    _judged(spec, catalogue)


@pytest.mark.parametrize("quantity", QUANTITIES)
@pytest.mark.parametrize("resource", ["memory", "cpu", "ephemeral-storage"])
def test_any_quantity_is_planned_or_refused(catalogue: Catalogue, resource: str, quantity: str) -> None:
    _judged(
        {**RIGHT["minimal"], "hardware": {"accelerator": "cpu", "resources": {"limits": {resource: quantity}}}},
        catalogue,
    )


def _judged(spec: Any, catalogue: Catalogue) -> None:
    document = {
        "apiVersion": "stoker.dev/v1alpha1",
        "kind": "InferenceEndpoint",
        "metadata": {"name": "a"},
        "spec": spec,
    }
    evaluation = evaluate(OWNER, document, PlanningContext(catalogue))
    assert bool(evaluation.objects) != bool(evaluation.violations)
    json.dumps([str(violation) for violation in evaluation.violations])
    for each in evaluation.objects:
        assert Child.of(each)
        differs(each, {**each, "metadata": {**each["metadata"], "managedFields": []}}, "stoker")


@pytest.mark.parametrize("text", ["a: 2001-99-99", "a: " + "9" * 5000, "[" * 3000], ids=lambda text: text[:8])
def test_yaml_that_python_cannot_represent_is_refused(text: str) -> None:
    with pytest.raises(Refused, match="the text is not YAML"):
        read(text)
