"""An object is applied exactly if a desired field is missing, or an owned field is left over."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from stoker_operator.reconcile.drift import differs, owned_part

DESIRED = {
    "metadata": {"name": "a", "annotations": {"x": "1"}, "ownerReferences": [{"uid": "u", "name": "a"}]},
    "spec": {
        "args": ["serve", "m"],
        "containers": [
            {
                "name": "engine",
                "env": [{"name": "A", "value": "1"}],
                "resources": {"limits": {"cpu": "1500m", "memory": "1024Mi", "nvidia.com/gpu": "4"}},
                "ports": [{"containerPort": 8000, "protocol": "TCP", "name": "http"}],
            }
        ],
        "volumes": [{"name": "cache", "emptyDir": {}}],
    },
}
# As the API server stores what one manager applied.
OWNED = {
    "f:metadata": {
        "f:annotations": {"f:x": {}},
        "f:ownerReferences": {'k:{"uid":"u"}': {}},
    },
    "f:spec": {
        "f:args": {},
        "f:containers": {
            'k:{"name":"engine"}': {
                ".": {},
                "f:name": {},
                "f:env": {'k:{"name":"A"}': {".": {}, "f:name": {}, "f:value": {}}},
                "f:ports": {'k:{"containerPort":8000,"protocol":"TCP"}': {".": {}, "f:name": {}}},
            }
        },
        "f:volumes": {'k:{"name":"cache"}': {".": {}, "f:emptyDir": {}, "f:name": {}}},
    },
}


def live() -> dict[str, Any]:
    """Return DESIRED as stored by the API server: normalized quantities, defaults, and other managers' fields."""
    made: dict[str, Any] = copy.deepcopy(DESIRED)
    container = made["spec"]["containers"][0]
    container["resources"]["limits"] = {"cpu": "1500m", "memory": "1Gi", "nvidia.com/gpu": 4}
    container["env"].insert(0, {"name": "THEIRS", "value": "2"})
    container["terminationMessagePath"] = "/dev/termination-log"
    made["spec"]["containers"].append({"name": "sidecar"})
    made["metadata"]["annotations"]["kubectl.kubernetes.io/restartedAt"] = "now"
    made["metadata"]["managedFields"] = [
        {"manager": "kubectl", "operation": "Apply", "fieldsV1": {"f:spec": {"f:other": {}}}},
        {"manager": "stoker", "operation": "Apply", "subresource": "status", "fieldsV1": {"f:status": {}}},
        {"manager": "stoker", "operation": "Apply", "fieldsV1": OWNED},
    ]
    return made


def test_defaults_and_fields_of_other_managers_are_no_drift() -> None:
    assert not differs(DESIRED, live(), "stoker")


def edit(path: str, value: Any) -> dict[str, Any]:
    changed = live()
    node: Any = changed
    *steps, last = path.split(".")
    for step in steps:
        node = node[int(step)] if step.isdigit() else node[step]
    if value is None:
        del node[int(last) if last.isdigit() else last]
    else:
        node[int(last) if last.isdigit() else last] = value
    return changed


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec.args", ["serve", "other"]),
        ("spec.args", ["serve", "m", "--more"]),
        ("spec.containers.0.env.1.value", "2"),
        ("spec.containers.0.env.1", None),
        ("spec.containers.0.resources.limits.cpu", "1501m"),
        ("spec.containers.0", None),
        ("metadata.annotations.x", None),
        ("metadata.ownerReferences", []),
    ],
)
def test_missing_desired_field_is_drift(path: str, value: Any) -> None:
    assert differs(DESIRED, edit(path, value), "stoker")


@pytest.mark.parametrize(
    "path",
    [
        "metadata.annotations.x",
        "spec.containers.0.env.0",
        "spec.containers.0.ports.0",
        "spec.volumes.0",
        "spec.args",
    ],
)
def test_leftover_owned_field_is_drift(path: str) -> None:
    desired: Any = copy.deepcopy(DESIRED)
    node = desired
    *steps, last = path.split(".")
    for step in steps:
        node = node[int(step)] if step.isdigit() else node[step]
    del node[int(last) if last.isdigit() else last]
    assert differs(desired, live(), "stoker")
    assert not differs(desired, live(), "someone who never applied")


@pytest.mark.parametrize(
    ("one", "other"), [("1", "1000m"), (2, "2"), ("1Gi", "1024Mi"), ("1e3", "1k"), ("0.5", "500m"), ("2M", "2000k")]
)
def test_quantities_are_compared_by_value(one: Any, other: Any) -> None:
    assert not differs({"limits": {"a": one}}, {"limits": {"a": other}, "metadata": {}}, "stoker")
    assert differs({"args": [one]}, {"args": [other], "metadata": {}}, "stoker")


@pytest.mark.parametrize("nothing", ["", 0, False, [], {}, None])
def test_empty_values_that_are_not_stored_are_no_drift(nothing: Any) -> None:
    live = {"metadata": {"name": "a"}, "spec": {"hostNetwork": True}}
    assert not differs({"metadata": {"name": "a"}, "spec": {"hostPID": nothing}}, live, "stoker")
    assert differs({"metadata": {"name": "a"}, "spec": {"hostNetwork": False}}, live, "stoker")


def test_a_volume_may_be_mounted_twice() -> None:
    mounts = [{"name": "data", "mountPath": "/a"}, {"name": "data", "mountPath": "/b"}]
    live = {"metadata": {}, "volumeMounts": [{**each, "readOnly": True} for each in mounts]}
    assert not differs({"volumeMounts": mounts}, live, "stoker")


def test_applied_part_is_read_from_the_live_object() -> None:
    live = edit("spec.replicas", 3)
    part = owned_part(live, "stoker")
    assert not differs(part, live, "stoker")
    assert "kubectl.kubernetes.io/restartedAt" not in part["metadata"]["annotations"]
    assert [each["name"] for each in part["spec"]["containers"]] == ["engine"]
    assert owned_part(live, "another") == {}
