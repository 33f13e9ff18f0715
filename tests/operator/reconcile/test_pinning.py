"""Two versions of the operator with one spec: which version's pods run."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

import pytest

from stoker_operator.api.manifest import parse
from stoker_operator.api.v1alpha1 import Spec
from stoker_operator.api.v1alpha1.base import NOT_IN_PODS, Part
from stoker_operator.api.v1alpha1.claim import VolumeClaimTemplate
from stoker_operator.api.v1alpha1.rollout import Rollout
from stoker_operator.objects.facts import MAIN, Child, Endpoint, Key
from stoker_operator.plan.catalogue import Catalogue
from stoker_operator.plan.placement import Placement
from stoker_operator.reconcile.drift import differs
from stoker_operator.reconcile.pinning import ANNOTATION, Pinned, digest, pin
from stoker_operator.reconcile.pinning import image as image_of
from stoker_operator.workloads.composition import Workload

ONE = Placement(Catalogue.load().accelerator("cpu"), 1, 1, 1, 1, 1)
FOUR = dataclasses.replace(ONE, tensor=2, data=2)


def rendered(image: str, replicas: int = 1, **container: Any) -> dict[str, Any]:
    """Return a Deployment as some version of the operator renders it."""
    engine = {"name": "engine", "image": image, "args": ["serve", "m"], **container}
    return {
        "kind": "Deployment",
        "metadata": {"name": "demo", "namespace": "default"},
        "spec": {"replicas": replicas, "template": {"spec": {"containers": [engine]}}},
    }


def facts(document: Any, **status: Any) -> Endpoint:
    return Endpoint(Key("default", "demo"), "uid-1", 3, False, document, status)


def applied(deployment: dict[str, Any]) -> dict[str, Any]:
    """Return the Deployment as stored by the API server, with defaults and managedFields."""

    def fields(value: Any) -> Any:
        if isinstance(value, dict):
            return {f"f:{name}": fields(inner) for name, inner in value.items()}
        if isinstance(value, list) and all(isinstance(item, dict) for item in value):
            return {"k:" + json.dumps({"name": item["name"]}): {".": {}, **fields(item)} for item in value}
        return {}

    entry = {"manager": "stoker", "operation": "Apply", "fieldsV1": fields({"spec": deployment["spec"]})}
    live: dict[str, Any] = json.loads(json.dumps(deployment))
    live["metadata"]["managedFields"] = [entry]
    live["spec"]["template"]["spec"]["containers"][0]["terminationMessagePath"] = "/dev/termination-log"
    return live


def pinned(deployment: dict[str, Any], live: Any, endpoint: Endpoint, placement: Placement = ONE) -> Pinned:
    seen = {} if live is None else {Child.of(live): live}
    return pin([deployment], Workload(MAIN, parse(endpoint.document).spec), placement, seen, endpoint, "stoker")


def applied_by(made: Pinned) -> dict[str, Any]:
    """Return the Deployment to apply."""
    (deployment,) = made.objects
    return deployment


def image(deployment: dict[str, Any]) -> str:
    """Return the engine's image in a Deployment."""
    return image_of(deployment["spec"]["template"])


def test_a_newer_operator_and_catalogue_change_no_pods(document: Any) -> None:
    first = pinned(rendered("engine:1"), None, facts(document()))
    assert applied_by(first)["spec"]["template"] == rendered("engine:1")["spec"]["template"]
    assert not first.waiting and not first.differs

    newer = rendered("engine:2", env=[{"name": "NEW", "value": "1"}])
    second = pinned(newer, applied_by(first), facts(document()))
    assert applied_by(second) == applied_by(first)
    assert (second.waiting, second.differs) == ("engine:2", True)


@pytest.mark.parametrize(
    "change",
    [
        {"replicas": 5},
        {"service": {"port": 80}},
        {"monitoring": {"podMonitor": "Disabled"}},
        {"networkPolicy": {"mode": "Open"}},
        {"rollout": {"maxSurge": 0, "maxUnavailable": 1}},
    ],
)
def test_fields_outside_the_pod_template_change_no_pods(document: Any, change: dict[str, Any]) -> None:
    first = applied_by(pinned(rendered("engine:1"), None, facts(document())))
    second = applied_by(pinned(rendered("engine:2", replicas=5), first, facts(document(**change))))
    assert image(second) == "engine:1"
    assert second["spec"]["replicas"] == 5


def test_growing_claim_changes_no_pods(document: Any) -> None:
    def cache(size: str, **metadata: Any) -> Any:
        spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": size}}}
        return {"cache": {"volumeClaimTemplate": {"spec": spec, "metadata": metadata}}}

    first = applied_by(pinned(rendered("engine:1"), None, facts(document(storage=cache("1Gi")))))
    for storage, expected in (
        (cache("2Gi", labels={"a": "b"}), "engine:1"),
        ({**cache("1Gi"), "shmSize": "1Gi"}, "engine:2"),
        ({"cache": {"emptyDir": {}}}, "engine:2"),
        ({}, "engine:2"),
    ):
        assert image(applied_by(pinned(rendered("engine:2"), first, facts(document(storage=storage))))) == expected


@pytest.mark.parametrize(
    "change", [{"engine": {"maxNumSeqs": 4}}, {"rollout": {"drainSeconds": 60}}, {"storage": {"shmSize": "1Gi"}}]
)
def test_changed_spec_gets_the_newest_image(document: Any, change: dict[str, Any]) -> None:
    first = applied_by(pinned(rendered("engine:1"), None, facts(document())))
    second = pinned(rendered("engine:2"), first, facts(document(**change)))
    assert image(applied_by(second)) == "engine:2"
    assert not second.waiting


def test_image_updates_always_gets_the_newest_image(document: Any) -> None:
    first = applied_by(pinned(rendered("engine:1"), None, facts(document())))
    always = facts(document(rollout={"imageUpdates": "Always"}))
    assert image(applied_by(pinned(rendered("engine:2"), first, always))) == "engine:2"


def test_foreign_changes_of_the_pod_template_are_reverted(document: Any) -> None:
    first = applied_by(pinned(rendered("engine:1"), None, facts(document())))
    live = applied(first)
    assert not differs(first, live, "stoker")
    live["spec"]["template"]["spec"]["containers"][0]["image"] = "theirs"
    repinned = applied_by(pinned(rendered("engine:2"), live, facts(document())))
    assert image(repinned) == "engine:1"
    assert differs(repinned, live, "stoker")


def test_deployment_without_a_record_stays_as_it_was_applied(document: Any) -> None:
    live = applied(rendered("engine:1"))
    known = facts(document(), observedGeneration=3)
    adopted = applied_by(pinned(rendered("engine:2"), live, known))
    assert adopted["spec"]["template"] == rendered("engine:1")["spec"]["template"]  # without other managers' additions
    assert ANNOTATION in adopted["metadata"]["annotations"]
    # Nothing was applied for a generation that the older release has not seen.
    changed = facts(document(), observedGeneration=2)
    assert image(applied_by(pinned(rendered("engine:2"), live, changed))) == "engine:2"


@pytest.mark.parametrize("record", ["", "{", "[]", "{}", '"x"', "null", '{"spec": 1}'])
def test_malformed_record_is_ignored(document: Any, record: str) -> None:
    live = applied(rendered("engine:1"))
    live["metadata"]["annotations"] = {ANNOTATION: record}
    assert image(applied_by(pinned(rendered("engine:2"), live, facts(document())))) == "engine:2"


def test_plan_is_recorded_with_the_pods(document: Any) -> None:
    first = pinned(rendered("engine:1"), None, facts(document()), FOUR)
    record = json.loads(applied_by(first)["metadata"]["annotations"][ANNOTATION])
    assert record["plan"] == first.plan == {"tensor": 2, "pipeline": 1, "data": 2, "nodes": 1, "idle": 0}
    # A later release with another plan keeps the pods, and their recorded facts.
    second = pinned(rendered("engine:2"), applied_by(first), facts(document()), ONE)
    assert (second.plan, second.differs) == (first.plan, True)
    # The same pods get the current plan: records of earlier releases lack one.
    del record["plan"]
    live = applied_by(first)
    live["metadata"]["annotations"][ANNOTATION] = json.dumps(record)
    again = pinned(rendered("engine:1"), live, facts(document()), FOUR)
    assert again.plan == first.plan


@pytest.mark.parametrize("plan", [{}, None, 1, [], {"tensor": "2"}, {"tensor": 2}])
def test_pods_without_a_recorded_plan_have_none(document: Any, plan: Any) -> None:
    live = applied_by(pinned(rendered("engine:1"), None, facts(document()), FOUR))
    record = json.loads(live["metadata"]["annotations"][ANNOTATION]) | {"plan": plan}
    live["metadata"]["annotations"][ANNOTATION] = json.dumps(record)
    second = pinned(rendered("engine:2"), live, facts(document()), FOUR)
    assert second.differs and second.plan == {}
    assert "plan" not in json.loads(applied_by(second)["metadata"]["annotations"][ANNOTATION])


def spec_of(made: Any) -> Spec:
    return parse(made).spec


def test_specs_that_mean_the_same_have_one_digest(document: Any) -> None:
    plain = digest(spec_of(document(engine={"dtype": "float32", "maxNumSeqs": 4})))
    assert plain == digest(spec_of(document(engine={"maxNumSeqs": 4, "dtype": "float32"})))
    # A missing field equals its default, also if the API server or a converter writes the default.
    for same in ({"engine": {"runtime": "stoker"}}, {"replicas": 1}, {"template": {}}, {"rollout": {"maxSurge": 2}}):
        made = document(**{"engine": {"dtype": "float32", "maxNumSeqs": 4}, **same})
        made["spec"]["engine"] |= {"dtype": "float32", "maxNumSeqs": 4}
        assert plain == digest(spec_of(made)), same
    assert plain != digest(spec_of(document()))


def test_every_field_is_declared_as_affecting_pods_or_not() -> None:
    """A new field replaces no pod while it is not set.

    Whether it does when set is declared in `NOT_IN_PODS`, and here, by the author of the field.
    """

    def fields(part: type[Part], marked: bool) -> set[str]:
        return {name for name, each in part.model_fields.items() if (NOT_IN_PODS in each.metadata) is marked}

    assert fields(Spec, True) == {"replicas", "service", "network_policy", "monitoring", "routing", "scaling"}
    assert fields(Spec, False) == {
        "hardware", "parallelism", "engine", "template", "model", "auth", "storage", "rollout",
    }  # fmt: skip
    assert fields(VolumeClaimTemplate, True) == {"metadata", "spec"}  # pods contain only its fixed name
    assert fields(Rollout, True) == {"max_surge", "max_unavailable", "image_updates"}
    assert fields(Rollout, False) == {"drain_seconds", "startup_timeout_seconds"}


def test_record_of_an_earlier_release_still_holds(document: Any) -> None:
    """Releases until 0.1 hashed the text of the spec."""
    old_digest = hashlib.sha256(json.dumps(document()["spec"], sort_keys=True).encode()).hexdigest()[:16]
    live = rendered("engine:1")
    record = {"spec": old_digest, "template": live["spec"]["template"]}
    live["metadata"]["annotations"] = {ANNOTATION: json.dumps(record)}
    upgraded = applied_by(pinned(rendered("engine:2"), live, facts(document(replicas=3))))
    assert image(upgraded) == "engine:1"
    routed = applied_by(pinned(rendered("engine:2"), live, facts(document(routing={"sessionHeader": "X-Session-Id"}))))
    assert image(routed) == "engine:1"
    assert json.loads(upgraded["metadata"]["annotations"][ANNOTATION])["spec"] == digest(spec_of(document()))
    changed = facts(document(engine={"maxNumSeqs": 4}))
    assert image(applied_by(pinned(rendered("engine:2"), live, changed))) == "engine:2"
