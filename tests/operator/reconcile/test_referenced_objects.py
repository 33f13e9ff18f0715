"""Pods that run with an older Secret or ConfigMap: detection, and report in the status."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from datetime import timedelta
from threading import Barrier, Thread
from typing import Any

import pytest

from stoker_operator.cluster.kube import KubeError
from stoker_operator.objects.facts import Container, Pod
from stoker_operator.reconcile.object_versions import ObjectVersions
from stoker_operator.reconcile.reconcile import Outcome
from stoker_operator.reconcile.referenced_objects import Reference, Version, older, references

from .fake_cluster import NOON, World

KEYS = Reference("spec.auth.apiKeysSecretRef", "Secret", "keys")
AUTH = {"apiKeysSecretRef": {"name": "keys"}}


def written(seconds: float) -> str:
    return f"{NOON + timedelta(seconds=seconds):%Y-%m-%dT%H:%M:%SZ}"


def pod(created: float, started: float | None, name: str = "demo-1") -> Pod:
    """Return a pod created and started these seconds after noon, as the API server and the node write times."""
    engine = Container("engine", running=started is not None, started="" if started is None else written(started))
    return Pod(name, written(created), ready=True, containers=(Container("sidecar", started=written(-9999)), engine))


def version(created: float, changed: float) -> Version:
    return Version(NOON + timedelta(seconds=created), NOON + timedelta(seconds=changed))


def of_vllm(**spec: Any) -> dict[str, Any]:
    return {"model": {"source": "hf://o/m"}, "engine": {"runtime": "vllm", "image": "x"}, **spec}


@pytest.mark.parametrize(
    ("object_", "pods", "behind"),
    [
        pytest.param((0, 1000), (500, 510), True, id="started before the change"),
        pytest.param((0, 1000), (1000, 1010), False, id="created after the change"),
        pytest.param((0, 1000), (500, 2000), False, id="container was restarted later"),
        pytest.param((0, 1000), (500, 1030), True, id="restarted while the kubelet may have had the earlier object"),
        pytest.param((0, 1000), (997, 1004), False, id="created by an API server whose clock is late"),
        pytest.param((0, 1000), (997, 998), True, id="created and started a moment before the change"),
        pytest.param((1000, 1000), (500, 1001), False, id="waited until the object was created"),
        pytest.param((1000, 1000), (500, 997), False, id="waited for the object on a node whose clock is late"),
        pytest.param((1000, 1000), (500, 510), True, id="object was deleted and created again"),
        pytest.param((0, 1000), (500, None), False, id="container does not run"),
    ],
)
def test_pods_with_an_older_object_are_found(object_: Any, pods: Any, behind: bool) -> None:
    found = older([KEYS], lambda _: version(*object_), [pod(*pods)])
    assert [each.pods for each in found] == ([("demo-1",)] if behind else [])


def test_pods_with_an_older_object_are_found_despite_clock_skew() -> None:
    """For all clock differences and kubelet cache delays within their bounds, no pod created after a change is
    reported, and none started well before it is missed.
    """
    rng = random.Random(7)
    for _ in range(500):
        changed, skew = rng.uniform(100, 10_000), rng.uniform(-4, 4)
        fresh = pod(changed + rng.uniform(0, 500) + skew, changed + 520 + skew, "fresh")
        started_late = rng.uniform(0, changed - 80)
        stale = pod(started_late + skew, started_late + rng.uniform(1, 60) + skew, "stale")
        found = older([KEYS], lambda _, changed=changed: version(0, changed), [fresh, stale])  # type: ignore[misc]
        assert [each.pods for each in found] == [("stale",)]


def test_version_is_the_last_change_of_the_data() -> None:
    data: Any = {"f:data": {"f:api-key": {}}, "f:type": {}}
    labels: Any = {"f:metadata": {"f:labels": {}}}
    metadata: Any = {
        "creationTimestamp": written(0),
        "managedFields": [
            {"manager": "a", "time": written(5), "fieldsV1": data},
            {"manager": "b", "time": written(9), "fieldsV1": {"f:binaryData": {}}},
            {"manager": "c", "time": written(20), "fieldsV1": labels},
            {"manager": "d", "fieldsV1": data},
            {"manager": "e", "time": written(30)},
        ],
    }
    assert Version.of(metadata) == version(0, 9)
    assert Version.of({"creationTimestamp": written(3)}) == version(3, 3)


def test_only_objects_that_are_read_at_start_are_checked(endpoint: Any) -> None:
    template = {"model": {"source": "hf://o/m", "tokenSecretRef": {"name": "token", "key": "t"}}}
    template["model"]["chatTemplate"] = {"configMapKeyRef": {"name": "templates", "key": "t"}}
    env = [
        {"name": "A", "value": "b"},
        {"name": "B", "valueFrom": {"secretKeyRef": {"name": "b", "key": "k"}}},
        {"name": "C", "valueFrom": {"configMapKeyRef": {"name": "b", "key": "k"}}},
        {"name": "D", "valueFrom": {"secretKeyRef": {"name": "b", "key": "l"}}},
    ]
    always = [
        Reference("spec.model.chatTemplate", "ConfigMap", "templates"),
        Reference("spec.engine.env[1]", "Secret", "b"),
        Reference("spec.engine.env[2]", "ConfigMap", "b"),
    ]
    spec = endpoint(**{**of_vllm(auth=AUTH), **template, "engine": {"runtime": "vllm", "env": env}}).spec
    assert sorted(references(spec)) == sorted([*always, KEYS])
    spec = endpoint(auth=AUTH, **template, engine={"env": env}).spec  # the engine reloads its folder of keys
    assert sorted(references(spec)) == sorted(always)


class Metadata:
    """Returns metadata of one object, and counts requests."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, str]] = []
        self.answer: Callable[[], Any] = lambda: {"creationTimestamp": written(0)}

    def metadata(self, *key: str) -> Any:
        self.requests.append(key)  # type: ignore[arg-type]
        return self.answer()


def test_an_object_is_read_once_an_interval() -> None:
    kube, now = Metadata(), [0.0]
    versions = ObjectVersions(kube, 600, lambda: now[0])  # type: ignore[arg-type]
    ready = Barrier(8)

    def look() -> None:
        ready.wait(60)
        assert versions.get("ns", KEYS) == version(0, 0)

    threads = [Thread(target=look) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert kube.requests == [("Secret", "ns", "keys")]
    now[0] = 440
    versions.get("ns", KEYS._replace(field="spec.engine.env[0]"))
    assert len(kube.requests) == 1
    now[0] = 480  # the earliest next read
    versions.get("ns", KEYS)
    versions.get("other", KEYS)
    assert len(kube.requests) == 3


@pytest.mark.parametrize("status", [0, 403, 500])
def test_an_object_that_cannot_be_read_is_unknown(status: int, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> Any:
        raise KubeError(status, "no")

    kube, now = Metadata(), [0.0]
    kube.answer = fail
    versions = ObjectVersions(kube, 600, lambda: now[0])  # type: ignore[arg-type]
    assert versions.get("ns", KEYS) is versions.get("ns", KEYS) is None
    assert len(kube.requests) == 1
    assert "could not read Secret keys of namespace ns" in caplog.text
    now[0], kube.answer = 500, lambda: {"creationTimestamp": written(0)}
    assert versions.get("ns", KEYS) == version(0, 0)
    now[0], kube.answer = 1000, fail
    assert versions.get("ns", KEYS) == version(0, 0)  # the last known version
    now[0], kube.answer = 1500, lambda: None
    assert versions.get("ns", KEYS) is None  # it does not exist


def test_status_names_pods_with_an_earlier_object_and_the_remedy(document: Any) -> None:
    world = World(document(**of_vllm(auth=AUTH)))
    known: list[Version | None] = [None]
    looked: list[Any] = []

    def find(*key: Any) -> Version | None:
        looked.append(key)
        return known[0]

    world.cluster = dataclasses.replace(world.cluster, version=find)
    world.reconcile()
    assert looked == []  # there are no pods
    done = {"observedGeneration": 1, "replicas": 1, "updatedReplicas": 1, "readyReplicas": 1, "availableReplicas": 1}
    world.change("Deployment", status=done)
    started = {"name": "engine", "ready": True, "state": {"running": {"startedAt": written(5)}}}
    world.pod(containerStatuses=[started], conditions=[{"type": "Ready", "status": "True"}])
    outcome, _ = world.reconcile()
    template = world.kube.objects["Deployment", "demo"]["spec"]["template"]
    assert ready(world) == "1 of 1 pods are ready with the newest spec"
    assert set(looked) == {("default", KEYS)}

    known[0] = version(-100, 300)
    world.now = NOON + timedelta(seconds=400)
    outcome, requests = world.reconcile()
    assert outcome in (Outcome.SETTLED, Outcome.MOVING)  # MOVING: it polls the engine for some minutes
    assert ready(world) == (
        "1 of 1 pods are ready with the newest spec; pod demo-1 runs with Secret keys (spec.auth.apiKeysSecretRef) as "
        "it was before 2026-01-01T12:05:00Z: kubectl rollout restart deployment/demo --namespace default updates them"
    )
    assert [each for each in requests if "list" not in each] == ["apply InferenceEndpoint/status", "create Event Ready"]
    assert world.kube.objects["Deployment", "demo"]["spec"]["template"] == template
    assert world.reconcile()[1] == []  # the Event is written once
    known[0] = version(-100, 350)  # another change
    assert "create Event Ready" in world.reconcile()[1]

    known[0] = None
    world.reconcile()
    assert ready(world) == "1 of 1 pods are ready with the newest spec"


def test_events_about_earlier_objects_are_not_repeated_if_the_message_is_cut(document: Any) -> None:
    secrets = [{"name": f"{index}-{'s' * 200}", "key": "key"} for index in range(9)]
    env = [{"name": f"K{secret['name'][0]}", "valueFrom": {"secretKeyRef": secret}} for secret in secrets]
    world = World(document(engine={"env": env}))
    world.cluster = dataclasses.replace(world.cluster, version=lambda *_: version(-100, 300))
    world.reconcile()
    world.serve()
    started = {"name": "engine", "ready": True, "state": {"running": {"startedAt": written(5)}}}
    world.pod(containerStatuses=[started], conditions=[{"type": "Ready", "status": "True"}])
    world.now = NOON + timedelta(seconds=400)
    assert "create Event Ready" in world.reconcile()[1]
    assert len(ready(world)) == 2048
    world.spec(monitoring={"podMonitor": "Disabled"})
    _, requests = world.reconcile()
    assert "apply InferenceEndpoint/status" in requests
    assert not [each for each in requests if each.startswith("create Event")]


def ready(world: World) -> str:
    conditions = world.kube.objects["InferenceEndpoint", "demo"]["status"]["conditions"]
    (found,) = (each for each in conditions if each["type"] == "Ready")
    assert (found["status"], found["reason"]) == ("True", "Ready")
    return str(found["message"])
