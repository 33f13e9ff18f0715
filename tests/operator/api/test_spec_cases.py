"""Valid specs are read, invalid ones are refused with the name of the field, and no spec makes the operator fail."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker_operator.api.manifest import parse
from stoker_operator.api.v1alpha1.crd import crd
from stoker_operator.api.violation import Refused
from stoker_operator.objects.owner import Owner
from stoker_operator.plan.catalogue import Catalogue
from stoker_operator.reconcile.evaluate import PlanningContext, evaluate

from .rule_breakers import RULE_BREAKERS
from .schema_faults import at, dotted, fields, generated
from .spec_cases import RIGHT, Wrong

SCHEMA = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
GENERATED = tuple(generated(SCHEMA))
OWNER = Owner("a", "default", "uid")


def manifest(spec: Any) -> dict[str, Any]:
    return {"apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceEndpoint", "metadata": {"name": "a"}, "spec": spec}


def names(node: dict[str, Any], path: str = "spec") -> set[str]:
    """Return the names of all fields below `node`."""
    found = set()
    for name, field in node.get("properties", {}).items():
        found |= {f"{path}.{name}"} | names(field, f"{path}.{name}")
    return found | (names(node["items"], f"{path}[]") if "items" in node else set())


@pytest.mark.parametrize("spec", RIGHT.values(), ids=RIGHT)
def test_valid_specs_are_parsed(spec: Any) -> None:
    endpoint = parse(manifest(spec))
    assert endpoint.spec.model.source == spec["model"]["source"]


def test_valid_specs_use_every_field() -> None:
    used = {dotted(path, index=False) for spec in RIGHT.values() for path, _ in fields(SCHEMA, spec)}
    assert names(SCHEMA) <= used


@pytest.mark.parametrize("wrong", RULE_BREAKERS, ids=lambda wrong: wrong.name)
def test_rule_breakers_are_refused_with_the_remedy(wrong: Wrong) -> None:
    with pytest.raises(Refused) as refused:
        parse(manifest(wrong.spec))
    (violation,) = refused.value.violations
    assert violation.field == wrong.field
    assert violation.sentence.startswith(wrong.sentence)


def test_every_rule_has_a_rule_breaker() -> None:
    def rules(node: dict[str, Any], path: str) -> set[tuple[str, str]]:
        found = {
            (path + rule.get("fieldPath", ""), rule["message"])
            for rule in node.get("x-kubernetes-validations", ())
            if "oldSelf" not in rule["rule"]
        }
        for name, field in node.get("properties", {}).items():
            found |= rules(field, f"{path}.{name}")
        return found | (rules(node["items"], f"{path}[0]") if "items" in node else set())

    unbroken = {
        (field, message)
        for field, message in rules(SCHEMA, "spec")
        if not any(
            wrong.field == field and (message.startswith(wrong.sentence) or wrong.sentence.startswith("tensor ("))
            for wrong in RULE_BREAKERS
            if wrong.sentence
        )
    }
    assert not unbroken


def test_invalid_specs_are_many_and_have_unique_names() -> None:
    assert len(GENERATED) + len(RULE_BREAKERS) >= 200
    assert len({wrong.name for wrong in GENERATED}) == len(GENERATED)


def test_wrong_fields_are_named() -> None:
    for wrong in GENERATED:
        with pytest.raises(Refused) as refused:
            parse(manifest(wrong.spec))
        assert wrong.field in {violation.field for violation in refused.value.violations}, wrong.name


def test_operator_refuses_invalid_specs(catalogue: Catalogue) -> None:
    """A spec that an older CRD let through is reported, and does not make the operator fail."""
    for wrong in (*RULE_BREAKERS, *GENERATED):
        evaluation = evaluate(OWNER, manifest(wrong.spec), PlanningContext(catalogue))
        assert wrong.field in {violation.field for violation in evaluation.refused}, wrong.name
        assert not evaluation.objects


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)
paths = [(name, path) for name, spec in RIGHT.items() for path, _ in fields(SCHEMA, spec)]


@settings(max_examples=1000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=st.sampled_from(paths), value=json_values)
def test_any_value_in_any_field_is_planned_or_refused(catalogue: Catalogue, where: Any, value: Any) -> None:
    name, path = where
    spec = copy.deepcopy(RIGHT[name])
    spec.setdefault("engine", {}).setdefault("image", "mine:1")  # the catalogue lacks some images
    at(spec, path[:-1])[path[-1]] = value
    evaluation = evaluate(OWNER, manifest(spec), PlanningContext(catalogue))
    assert bool(evaluation.objects) != bool(evaluation.violations)
    assert all(violation.field and violation.message for violation in evaluation.violations)
    json.dumps([str(violation) for violation in evaluation.violations])
