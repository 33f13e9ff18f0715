"""Two versions of the operator, one spec: whose pods run."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stoker_operator.drift import differs
from stoker_operator.facts import Endpoint, Key
from stoker_operator.pinning import ANNOTATION, digest, image, pin


def rendered(image: str, replicas: int = 1, **container: Any) -> dict[str, Any]:
    """A Deployment as some version of the operator builds it."""
    engine = {"name": "engine", "image": image, "args": ["serve", "m"], **container}
    return {
        "kind": "Deployment",
        "metadata": {"name": "demo", "namespace": "default"},
        "spec": {"replicas": replicas, "template": {"spec": {"containers": [engine]}}},
    }


def facts(document: Any, **status: Any) -> Endpoint:
    return Endpoint(Key("default", "demo"), "uid-1", 3, False, document, status)


def applied(deployment: dict[str, Any]) -> dict[str, Any]:
    """What an API server makes of it: defaults are added, and it is remembered who set what."""

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


def test_a_newer_operator_and_catalogue_change_no_pods(document: Any) -> None:
    first = pin(rendered("engine:1"), None, facts(document()), "stoker", newest=False)
    assert first.deployment["spec"]["template"] == rendered("engine:1")["spec"]["template"]
    assert not first.waiting and not first.differs

    newer = rendered("engine:2", env=[{"name": "NEW", "value": "1"}])
    second = pin(newer, first.deployment, facts(document()), "stoker", newest=False)
    assert second.deployment == first.deployment
    assert (second.waiting, second.differs) == ("engine:2", True)


@pytest.mark.parametrize(
    "change",
    [
        {"replicas": 5},
        {"service": {"port": 80}},
        {"monitoring": {"podMonitor": "Disabled"}},
        {"rollout": {"maxSurge": 0, "maxUnavailable": 1}},
    ],
)
def test_what_pods_do_not_show_changes_no_pods(document: Any, change: dict[str, Any]) -> None:
    first = pin(rendered("engine:1"), None, facts(document()), "stoker", newest=False).deployment
    second = pin(rendered("engine:2", replicas=5), first, facts(document(**change)), "stoker", newest=False).deployment
    assert image(second) == "engine:1"
    assert second["spec"]["replicas"] == 5


@pytest.mark.parametrize(
    "change", [{"engine": {"maxNumSeqs": 4}}, {"rollout": {"drainSeconds": 60}}, {"template": {"metadata": {}}}]
)
def test_a_changed_spec_takes_the_newest(document: Any, change: dict[str, Any]) -> None:
    first = pin(rendered("engine:1"), None, facts(document()), "stoker", newest=False).deployment
    second = pin(rendered("engine:2"), first, facts(document(**change)), "stoker", newest=False)
    assert image(second.deployment) == "engine:2"
    assert not second.waiting


def test_always_takes_the_newest(document: Any) -> None:
    first = pin(rendered("engine:1"), None, facts(document()), "stoker", newest=False).deployment
    assert image(pin(rendered("engine:2"), first, facts(document()), "stoker", newest=True).deployment) == "engine:2"


def test_what_others_change_of_the_pods_is_put_back(document: Any) -> None:
    first = pin(rendered("engine:1"), None, facts(document()), "stoker", newest=False).deployment
    live = applied(first)
    assert not differs(first, live, "stoker")
    live["spec"]["template"]["spec"]["containers"][0]["image"] = "theirs"
    again = pin(rendered("engine:2"), live, facts(document()), "stoker", newest=False).deployment
    assert image(again) == "engine:1"
    assert differs(again, live, "stoker")


def test_a_deployment_without_a_record_is_left_as_it_was_applied(document: Any) -> None:
    live = applied(rendered("engine:1"))
    known = facts(document(), observedGeneration=3)
    adopted = pin(rendered("engine:2"), live, known, "stoker", newest=False).deployment
    assert adopted["spec"]["template"] == rendered("engine:1")["spec"]["template"]  # without what others added
    assert ANNOTATION in adopted["metadata"]["annotations"]
    # Of a generation that the older release has not seen, nothing was applied.
    changed = facts(document(), observedGeneration=2)
    assert image(pin(rendered("engine:2"), live, changed, "stoker", newest=False).deployment) == "engine:2"


@pytest.mark.parametrize("record", ["", "{", "[]", "{}", '"x"', "null", '{"spec": 1}'])
def test_a_record_that_is_none_of_ours_counts_for_nothing(document: Any, record: str) -> None:
    live = applied(rendered("engine:1"))
    live["metadata"]["annotations"] = {ANNOTATION: record}
    assert image(pin(rendered("engine:2"), live, facts(document()), "stoker", newest=False).deployment) == "engine:2"


def test_the_digest_does_not_depend_on_the_order_of_fields() -> None:
    assert digest({"a": 1, "b": {"c": 2, "d": 3}}) == digest({"b": {"d": 3, "c": 2}, "a": 1})
    assert digest({"rollout": {"maxSurge": 1}}) == digest({})
