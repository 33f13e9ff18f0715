"""An endpoint of two workloads, each with two objects of a kind that exists only in tests: only the Deployment kind's
own file depends on Deployments.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

import stoker_operator
from stoker_operator.api.v1alpha1 import KIND, Spec
from stoker_operator.objects.facts import Child, Object, Reported
from stoker_operator.objects.owner import COMPONENT, OPERATOR, Manifest, Owner
from stoker_operator.plan.catalogue import Catalogue
from stoker_operator.reconcile.pinning import ANNOTATION
from stoker_operator.reconcile.reconcile import Outcome
from stoker_operator.workloads.composition import ONE_DEPLOYMENT, Composition, Role, Workload
from stoker_operator.workloads.kind import PodSet

from ...support.stateful_sets import PAIR, PREFILL, PREFILL_SEQUENCES, TWO_PAIRS, StatefulSetPair, two_workloads
from .fake_cluster import World
from .test_pending_config import LARGE

SETS = ("demo-leader", "demo-worker", "demo-prefill-leader", "demo-prefill-worker")
ROOT = Path(__file__).parents[3]


@pytest.fixture
def pairs(document: Any) -> World:
    return World(document(replicas=2), TWO_PAIRS)


def templates(world: World) -> dict[str, Any]:
    return {name: world.kube.objects["StatefulSet", name]["spec"]["template"] for name in SETS}


def serve(world: World, *names: str) -> None:
    """Mark all pods of these StatefulSets as serving."""
    for name in names or SETS:
        replicas = world.kube.objects["StatefulSet", name]["spec"]["replicas"]
        counts = dict.fromkeys(("replicas", "updatedReplicas", "readyReplicas", "availableReplicas"), replicas)
        world.change("StatefulSet", name, status={**counts, "observedGeneration": 99, "updateRevision": f"{name}-1"})


def pod(world: World, name: str, **status: Any) -> None:
    """Set the status of this StatefulSet's first pod."""
    template = world.kube.objects["StatefulSet", name]["spec"]["template"]
    labels = {**template["metadata"]["labels"], "controller-revision-hash": f"{name}-1"}
    created = "2026-01-01T12:00:00Z"
    metadata = {"name": f"{name}-0", "namespace": "default", "labels": labels, "creationTimestamp": created}
    body = {"kind": "Pod", "metadata": metadata, "spec": template["spec"], "status": status}
    world.store.put(world.kube.seen(body))


def with_prefill(sequences: int) -> dict[str, Any]:
    return {"template": {"metadata": {"annotations": {PREFILL_SEQUENCES: str(sequences)}}}}


def test_two_workloads_of_two_objects_are_created_and_reported(pairs: World) -> None:
    outcome, requests = pairs.reconcile()
    assert outcome is Outcome.MOVING
    assert [each.removeprefix("apply ") for each in requests if each.startswith("apply")] == [
        "ServiceAccount", "Service", "NetworkPolicy", "PodDisruptionBudget", "StatefulSet", "StatefulSet",
        "ServiceAccount", "NetworkPolicy", "StatefulSet", "StatefulSet", f"{KIND}/status",
    ]  # fmt: skip
    assert {name for kind, name in pairs.kube.objects if kind == "StatefulSet"} == set(SETS)
    assert {name for kind, name in pairs.kube.objects if kind in ("Service", "PodDisruptionBudget")} == {"demo"}
    owner = Owner("demo", "default", "u")
    service = pairs.kube.objects["Service", "demo"]
    assert service["spec"]["selector"] == owner.of("main", "leader").selector()
    budget = pairs.kube.objects["PodDisruptionBudget", "demo"]
    assert budget["spec"]["selector"]["matchLabels"] == owner.selector()  # a worker's eviction also ends a replica
    assert pairs.ready()["message"] == "0 of 2 replicas are ready with the newest spec, 0 of 4 pods are ready"
    assert pairs.reconcile() == (Outcome.MOVING, [])

    serve(pairs, "demo-leader", "demo-worker", "demo-prefill-leader")
    assert pairs.reconcile()[0] is Outcome.MOVING
    assert pairs.ready()["message"] == "0 of 2 replicas are ready with the newest spec, 2 of 4 pods are ready"
    serve(pairs, "demo-prefill-worker")
    assert pairs.reconcile()[0] is Outcome.SETTLED
    status = pairs.kube.objects[KIND, "demo"]["status"]
    assert (status["replicas"], status["readyReplicas"], status["availableReplicas"]) == (2, 2, 2)
    assert f"{COMPONENT}=leader" in status["selector"]
    assert [each["name"] for each in status["workloads"]] == ["main", "prefill"]
    assert (pairs.ready()["status"], pairs.ready()["message"]) == (
        "True",
        "2 of 2 replicas are ready with the newest spec",
    )
    planned = next(each["message"] for each in status["conditions"] if each["type"] == "Planned")
    assert planned.startswith("workload main: each pod runs") and "workload prefill: each pod runs" in planned
    pairs.restart()
    assert pairs.reconcile() == (Outcome.SETTLED, [])


def test_change_of_one_workload_restarts_only_that_one(pairs: World) -> None:
    pairs.reconcile()
    serve(pairs)
    before = templates(pairs)
    pairs.context = dataclasses.replace(pairs.context, catalogue=_newer_images())
    pairs.spec(**with_prefill(3))
    pairs.reconcile()
    after = templates(pairs)
    assert {name for name in SETS if before[name] != after[name]} == {"demo-prefill-leader", "demo-prefill-worker"}
    assert "--max-num-seqs=3" in after["demo-prefill-leader"]["spec"]["containers"][0]["args"]
    status = pairs.kube.objects[KIND, "demo"]["status"]
    images = {each["name"]: each["image"] for each in status["workloads"]}
    assert images["main"] != images["prefill"] == "newer:1"

    # A change that concerns both restarts both.
    pairs.spec(engine={"dtype": "float32"})
    pairs.reconcile()
    assert all(after[name] != each for name, each in templates(pairs).items())


def _newer_images() -> Catalogue:
    catalogue = Catalogue.load()
    runtimes = {name: dict.fromkeys(each, "newer:1") for name, each in catalogue.runtimes.items()}
    return catalogue.model_copy(update={"runtimes": runtimes})


def test_each_object_is_pinned_to_its_workloads_rendering(pairs: World) -> None:
    pairs.reconcile()
    serve(pairs)
    before = templates(pairs)
    pairs.context = dataclasses.replace(pairs.context, catalogue=_newer_images())
    pairs.spec(replicas=3)
    pairs.reconcile()
    assert templates(pairs) == before
    for name in SETS:
        live = pairs.kube.objects["StatefulSet", name]
        assert live["spec"]["replicas"] == 3
        record = json.loads(live["metadata"]["annotations"][ANNOTATION])
        assert (record["template"], record["plan"]["tensor"]) == (before[name], 1)
    serve(pairs)
    pairs.reconcile()
    conditions = pairs.kube.objects[KIND, "demo"]["status"]["conditions"]
    assert "NewerImageWaiting" in {each["reason"] for each in conditions}


@pytest.mark.parametrize("lost", ["demo-leader", "demo-worker", "demo-prefill-worker"])
def test_recreated_object_equals_the_others_of_its_workload(pairs: World, lost: str) -> None:
    """All pods of a replica are rendered by the same release of the operator."""
    pairs.reconcile()
    serve(pairs)
    before = templates(pairs)
    pairs.context = dataclasses.replace(pairs.context, catalogue=_newer_images())
    pairs.store.remove(pairs.kube.objects.pop(("StatefulSet", lost)))
    assert pairs.reconcile()[1].count("apply StatefulSet") == 1
    assert templates(pairs) == before
    pairs.restart()
    assert not [each for each in pairs.reconcile()[1] if "apply StatefulSet" in each]


def test_newer_operator_completes_a_half_applied_workload(pairs: World) -> None:
    pairs.reconcile()
    serve(pairs)
    before = pairs.kube.objects["StatefulSet", "demo-worker"]
    pairs.spec(engine={"dtype": "float32"})
    pairs.reconcile()
    half = templates(pairs)
    pairs.change("StatefulSet", "demo-worker", spec=before["spec"], metadata=before["metadata"])
    pairs.context = dataclasses.replace(pairs.context, catalogue=_newer_images())
    pairs.reconcile()
    assert templates(pairs) == half


def test_a_pod_of_any_component_that_fails_is_reported(pairs: World) -> None:
    pairs.reconcile()
    serve(pairs, "demo-leader", "demo-worker", "demo-prefill-leader")
    ready = [{"type": "Ready", "status": "True"}]
    pod(pairs, "demo-prefill-leader", conditions=ready)
    lacking = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no room"}
    pairs.change("StatefulSet", "demo-prefill-worker", status={
        "replicas": 2, "updatedReplicas": 2, "observedGeneration": 99, "updateRevision": "demo-prefill-worker-1",
    })  # fmt: skip
    pod(pairs, "demo-prefill-worker", phase="Pending", conditions=[lacking])
    pairs.reconcile()
    assert pairs.ready()["reason"] == "Unschedulable"
    assert "no node has room for pod demo-prefill-worker-0" in pairs.ready()["message"]


def test_only_pods_that_accept_requests_are_polled_for_engine_facts(document: Any) -> None:
    world = World(document(parallelism={"tensor": 2}), TWO_PAIRS)
    world.reconcile()
    serve(world)
    ready = [{"type": "Ready", "status": "True"}]
    for number, name in enumerate(SETS):
        pod(world, name, conditions=ready, podIP=f"10.0.0.{number}")
    asked: list[tuple[str, str]] = []

    def reported(_key: Any, workload: str, name: str, _url: str) -> Reported:
        asked.append((workload, name))
        return Reported(7)

    world.cluster = dataclasses.replace(world.cluster, reported=reported)
    world.reconcile()
    assert asked == [("main", "demo-leader-0"), ("prefill", "demo-prefill-leader-0")]
    watched = [(workload, list(urls)) for _, workload, urls in world.asked_for_engines[-2:]]
    assert watched == [("main", ["demo-leader-0"]), ("prefill", ["demo-prefill-leader-0"])]


def test_objects_of_a_removed_workload_are_deleted(pairs: World) -> None:
    pairs.reconcile()
    serve(pairs)
    only_main = Composition((PAIR,), lambda spec: two_workloads(spec)[:1])
    pairs.context = dataclasses.replace(pairs.context, composition=only_main)
    _, requests = pairs.reconcile()
    assert sorted(each for each in requests if each.startswith("delete")) == [
        "delete NetworkPolicy", "delete ServiceAccount", "delete StatefulSet", "delete StatefulSet",
    ]  # fmt: skip
    assert {name for kind, name in pairs.kube.objects if kind == "StatefulSet"} == {"demo-leader", "demo-worker"}


def test_workload_of_a_new_kind_keeps_no_object_of_the_earlier_kind(document: Any) -> None:
    world = World(document())
    world.reconcile()
    world.context = dataclasses.replace(
        world.context, composition=Composition((*ONE_DEPLOYMENT.kinds, PAIR), two_workloads)
    )
    world.reconcile()
    assert ("Deployment", "demo") not in world.kube.objects
    assert {name for kind, name in world.kube.objects if kind == "StatefulSet"} == set(SETS)


def test_users_objects_with_our_labels_are_left_alone(pairs: World) -> None:
    """Objects are known by names and selectors; labels alone do not make an object the operator's."""
    pairs.reconcile()
    copied = pairs.kube.objects["StatefulSet", "demo-worker"]
    metadata = {**copied["metadata"], "name": "demo-copy"}
    del metadata["ownerReferences"]
    pairs.store.put(pairs.kube.seen({**copied, "metadata": metadata}))
    assert not [each for each in pairs.reconcile()[1] if "StatefulSet" in each]
    assert ("StatefulSet", "demo-copy") in pairs.kube.objects


def test_a_component_that_lost_its_owner_is_adopted(pairs: World) -> None:
    pairs.reconcile()
    orphan = pairs.kube.objects["StatefulSet", "demo-prefill-worker"]
    pairs.change("StatefulSet", "demo-prefill-worker", metadata={**orphan["metadata"], "ownerReferences": []})
    assert "apply StatefulSet" in pairs.reconcile()[1]
    assert pairs.kube.objects["StatefulSet", "demo-prefill-worker"]["metadata"]["ownerReferences"]


def test_a_foreign_object_with_a_components_name_is_left_alone(pairs: World) -> None:
    pairs.kube.seen({"kind": "StatefulSet", "metadata": {"name": "demo-worker", "namespace": "default"}, "spec": {}})
    outcome, requests = pairs.reconcile()
    assert outcome is Outcome.MOVING and not [each for each in requests if each == "apply StatefulSet"]
    assert pairs.ready()["reason"] == "NameConflict" and "StatefulSet demo-worker" in pairs.ready()["message"]


def test_kind_gets_only_its_workloads_live_objects(document: Any) -> None:
    given: list[tuple[str, set[str]]] = []

    class Recording(StatefulSetPair):
        def objects(self, pods: PodSet, live: Mapping[Child, Object]) -> tuple[Manifest, ...]:
            given.append((pods.owner.workload, {each["metadata"]["name"] for each in live.values()}))
            return super().objects(pods, live)

    kind = Recording()
    world = World(document(), Composition((kind,), lambda spec: tuple(
        dataclasses.replace(each, kind=kind) for each in two_workloads(spec)
    )))  # fmt: skip
    world.reconcile()
    assert given == [("main", set()), ("prefill", set())]
    given.clear()
    world.reconcile()
    assert given == [
        ("main", {"demo-leader", "demo-worker"}),
        ("prefill", {"demo-prefill-leader", "demo-prefill-worker"}),
    ]


def test_role_decides_which_workload_the_service_selects(document: Any) -> None:
    def disaggregated(spec: Spec) -> tuple[Workload, ...]:
        more = spec.model_copy(update={"replicas": 3})
        return Workload(PREFILL, more, PAIR, Role.SUPPORTING), Workload("decode", spec, PAIR)

    world = World(document(replicas=2), Composition((PAIR,), disaggregated))
    world.reconcile()
    decode = Owner("demo", "default", "u").of("decode")
    assert world.kube.objects["Service", "demo"]["spec"]["selector"] == PAIR.request_pods(decode)
    budget = world.kube.objects["PodDisruptionBudget", "demo"]
    assert budget["spec"]["selector"]["matchLabels"] == decode.selector()
    serve(world, *(name for kind, name in world.kube.objects if kind == "StatefulSet"))
    assert world.reconcile()[0] is Outcome.SETTLED
    status = world.kube.objects[KIND, "demo"]["status"]
    assert (status["replicas"], status["url"]) == (2, "http://demo.default.svc:8000/v1")
    assert "stoker.dev/workload=decode" in status["selector"]
    world.spec(hardware={"accelerator": "nothing"})  # refused; running pods are unchanged
    world.reconcile()
    assert world.ready()["status"] == "False"
    assert world.kube.objects[KIND, "demo"]["status"]["selector"] == status["selector"]


def test_templates_of_users_are_checked_by_the_api_server_first(document: Any) -> None:
    world = World(document(template={"spec": {"hostname": "x"}}), TWO_PAIRS)
    world.kube.refuse["StatefulSet"] = "no such field"
    requests = world.reconcile()[1]
    assert requests[:2] != [] and "check StatefulSet" in requests and "apply Service" not in requests
    assert world.ready()["reason"] == "InvalidTemplate"


def test_pods_are_not_created_without_their_objects(pairs: World) -> None:
    pairs.kube.refuse["Service"] = "quota"
    outcome, requests = pairs.reconcile()
    assert outcome is Outcome.REFUSED and "apply StatefulSet" not in requests


def test_pods_found_not_to_fit_are_deleted(document: Any) -> None:
    def large_prefill(spec: Spec) -> tuple[Workload, ...]:
        main, prefill = two_workloads(spec)
        model = spec.model.model_copy(update={"source": "hf://org/large"})
        return main, dataclasses.replace(prefill, spec=prefill.spec.model_copy(update={"model": model}))

    found: dict[str, Any] = {}
    manifest = document(hardware={"accelerator": "nvidia-l4", "count": 1}, engine={"image": "x"})
    world = World(manifest, Composition((PAIR,), large_prefill))
    world.context = dataclasses.replace(world.context, configs=lambda name, _: found.get(name))
    world.reconcile()
    found["org/large"] = LARGE
    requests = world.reconcile()[1]
    assert world.ready()["reason"] == "DoesNotFit"
    assert requests.count("delete StatefulSet") == 2  # prefill's; the other workload can run
    assert {name for kind, name in world.kube.objects if kind == "StatefulSet"} == {"demo-leader", "demo-worker"}


def test_each_object_names_the_serving_operator() -> None:
    owner = Owner("demo", "default", "u", operator="ns/lease")
    assert all(
        kind.metadata(owner.of("main", component))["annotations"] == {OPERATOR: "ns/lease"}
        for kind, component in ((ONE_DEPLOYMENT.kinds[0], ""), (PAIR, "leader"))
    )


def test_component_of_a_child_is_the_end_of_its_name() -> None:
    owner = Owner("demo", "default", "u")
    for workload, component in (("main", ""), ("main", "worker"), ("prefill", ""), ("prefill", "a-b")):
        of_child = owner.of(workload, component)
        assert Child.of({"kind": "StatefulSet", "metadata": of_child.metadata()}) == Child(
            "StatefulSet", workload, component
        )
        assert owner.name_of(Child("StatefulSet", workload, component)) == of_child.object_name


def test_chart_grants_the_verbs_that_kinds_need() -> None:
    rendered = yaml.safe_load_all((ROOT / "e2e/apiserver/golden/chart-default.yaml").read_text())
    rules = [rule for each in rendered if each and each["kind"] == "ClusterRole" for rule in each["rules"]]
    for kind in ONE_DEPLOYMENT.kinds:
        resource = kind.resource
        verbs = [
            set(rule["verbs"])
            for rule in rules
            if resource.group in rule["apiGroups"] and resource.plural in rule["resources"]
        ]
        assert any(set(kind.verbs) <= each for each in verbs), resource


def test_only_the_deployment_kind_and_the_path_table_name_deployments() -> None:
    package = Path(stoker_operator.__file__).parent
    naming = {
        str(path.relative_to(package)) for path in package.rglob("*.py") if re.search('"Deployment"', path.read_text())
    }
    assert naming == {
        "workloads/deployment.py",
        "cluster/kube.py",
        "reconcile/other_operators.py",  # it looks up the Deployment of an operator
    }
