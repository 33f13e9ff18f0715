"""Reconcile of one endpoint, with a fake API server that records requests.

Merging, defaults and garbage collection are tested with the real one in e2e/apiserver.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from stoker_operator.api.v1alpha1 import KIND
from stoker_operator.objects.owner import GENERATION
from stoker_operator.plan.capacity import Holder
from stoker_operator.policy.policy import Policy
from stoker_operator.reconcile.evaluate import PlanningContext
from stoker_operator.reconcile.reconcile import Outcome
from stoker_operator.reconcile.routing import Route
from stoker_operator.settings import GatewaySettings

from .fake_cluster import World


def test_endpoint_is_created_once_and_then_causes_no_requests(world: World) -> None:
    outcome, requests = world.reconcile()
    assert outcome is Outcome.MOVING
    assert [each for each in requests if each.startswith("apply")] == [
        "apply ServiceAccount", "apply Service", "apply NetworkPolicy", "apply Deployment",
        f"apply {KIND}/status",
    ]  # fmt: skip
    assert requests[-1] == "create Event RollingOut"
    assert world.reconcile() == (Outcome.MOVING, [])
    world.serve()
    outcome, requests = world.reconcile()
    assert (outcome, requests) == (Outcome.SETTLED, [f"apply {KIND}/status", "create Event Ready"])
    assert world.reconcile() == (Outcome.SETTLED, [])
    world.restart()
    assert world.reconcile() == (Outcome.SETTLED, [])


def test_problems_of_an_older_specs_pods_are_not_reported_for_the_new_one(world: World) -> None:
    world.reconcile()
    waiting = {"reason": "ErrImagePull", "message": "no such image"}
    world.pod(containerStatuses=[{"name": "engine", "state": {"waiting": waiting}}])
    world.change("Deployment", status={"observedGeneration": 1, "replicas": 1, "updatedReplicas": 1})
    world.reconcile()
    assert world.ready()["reason"] == "ImagePullError"
    world.spec(engine={"image": "another"})
    world.reconcile()
    assert world.ready()["reason"] == "RollingOut"
    # The Deployment's controller has seen the change, and the older pod still exists.
    world.change("Deployment", status={"observedGeneration": 2, "replicas": 1, "updatedReplicas": 0})
    world.reconcile()
    assert world.ready()["reason"] == "RollingOut"


def test_a_newer_operator_writes_nothing(world: World) -> None:
    world.reconcile()
    world.serve()
    world.reconcile()
    catalogue = world.context.catalogue
    runtimes = {**catalogue.runtimes, "stoker": {"cpu": "stoker/engine-cpu:99"}}
    world.context = PlanningContext(catalogue.model_copy(update={"runtimes": runtimes}))
    world.restart()
    _, requests = world.reconcile()
    assert requests == [f"apply {KIND}/status"]  # it reports that a newer image waits
    assert world.reconcile() == (Outcome.SETTLED, [])
    world.spec(engine={"maxNumSeqs": 4})
    world.reconcile()
    (container,) = world.kube.objects["Deployment", "demo"]["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "stoker/engine-cpu:99"


def test_scaling_keeps_the_older_image(world: World) -> None:
    world.reconcile()
    world.context = PlanningContext(
        world.context.catalogue.model_copy(update={"runtimes": {"stoker": {"cpu": "stoker/engine-cpu:99"}}})
    )
    world.spec(replicas=3)
    _, requests = world.reconcile()
    assert "apply PodDisruptionBudget" in requests
    deployment = world.kube.objects["Deployment", "demo"]
    assert deployment["spec"]["replicas"] == 3
    assert deployment["spec"]["template"]["spec"]["containers"][0]["image"] == "stoker/engine-cpu:0.1.0"
    world.spec(replicas=1)
    _, requests = world.reconcile()
    assert "delete PodDisruptionBudget" in requests


@pytest.mark.parametrize("use", ["Restricted", "None"])
def test_a_stricter_policy_stops_nothing_that_runs(document: Any, use: Any) -> None:
    world = World(document(template={"spec": {"hostPID": True}}))
    world.reconcile()
    world.serve()
    assert world.reconcile()[0] is Outcome.SETTLED
    world.context = dataclasses.replace(world.context, policy=Policy(template=use))
    world.restart()
    _, requests = world.reconcile()
    assert requests == [f"apply {KIND}/status", "create Event TemplateNotPermitted"]
    assert world.ready()["message"].startswith("spec.template.spec")
    assert world.kube.objects["Deployment", "demo"]["spec"]["template"]["spec"]["hostPID"] is True
    world.spec(template={})
    _, requests = world.reconcile()
    assert "apply Deployment" in requests
    assert "hostPID" not in world.kube.objects["Deployment", "demo"]["spec"]["template"]["spec"]


def test_network_policy_changes_without_replacing_pods(world: World) -> None:
    world.reconcile()
    world.spec(networkPolicy={"mode": "None"}, service={"type": "NodePort"})
    _, requests = world.reconcile()
    assert [each for each in requests if "NetworkPolicy" in each] == ["delete NetworkPolicy"]
    assert "apply Deployment" not in requests
    world.spec(networkPolicy={"mode": "Open"})
    _, requests = world.reconcile()
    assert "apply NetworkPolicy" in requests and "apply Deployment" not in requests
    world.spec(networkPolicy={})  # a node port, while no client from outside is admitted
    _, requests = world.reconcile()
    assert requests == [f"apply {KIND}/status", "create Event Invalid"]
    assert "from" not in world.kube.objects["NetworkPolicy", "demo"]["spec"]["ingress"][0]


def test_pods_refused_by_the_api_server_are_blamed_on_the_template(document: Any) -> None:
    world = World(document(template={"spec": {"nodeSelectr": {}}}))
    world.kube.refuse["Deployment"] = ".spec.template.spec.nodeSelectr: field not declared in schema"
    outcome, requests = world.reconcile()
    assert outcome is Outcome.REFUSED
    assert "check Deployment" in requests
    assert not [each for each in requests if each.startswith("apply") and "status" not in each]  # nothing is applied
    assert world.ready()["reason"] == "InvalidTemplate"
    assert "spec.template: " in world.ready()["message"] and "nodeSelectr" in world.ready()["message"]
    world.kube.refuse.clear()
    world.spec(template={"spec": {"nodeSelector": {"disk": "ssd"}}})
    world.reconcile()
    assert world.ready()["reason"] == "RollingOut"


def test_unlabelled_object_of_the_name_is_a_conflict(world: World) -> None:
    theirs = {"kind": "Service", "metadata": {"name": "demo", "namespace": "default"}, "spec": {"selector": {"a": "b"}}}
    world.kube.seen(theirs)
    outcome, requests = world.reconcile()
    assert outcome is Outcome.MOVING  # it is reconciled again
    assert world.ready()["reason"] == "NameConflict"
    assert not [each for each in requests if each.startswith("apply") and "status" not in each]
    assert world.kube.objects["Service", "demo"]["spec"] == {"selector": {"a": "b"}}


@pytest.mark.parametrize("generation", [1, 7])
def test_objects_that_lost_their_owner_are_adopted(world: World, generation: int) -> None:
    world.reconcile()
    world.serve()
    made = [kind for kind, name in world.kube.objects if name == "demo" and kind != KIND]
    assert len(made) > 3
    for kind in made:
        metadata = dict(world.kube.objects[kind, "demo"]["metadata"])
        del metadata["ownerReferences"]
        if kind == "Deployment":
            metadata["annotations"] = metadata["annotations"] | {GENERATION: str(generation)}
        world.change(kind, metadata=metadata)
    template = world.kube.objects["Deployment", "demo"]["spec"]["template"]
    world.reconcile()
    for kind in made:
        (reference,) = world.kube.objects[kind, "demo"]["metadata"]["ownerReferences"]
        assert reference["uid"] == world.kube.objects[KIND, "demo"]["metadata"]["uid"], kind
    assert world.kube.objects["Deployment", "demo"]["spec"]["template"] == template, "no pod is restarted"
    assert world.ready()["reason"] == "Ready"
    assert world.reconcile()[1] == []


def test_object_with_another_selector_is_not_adopted(world: World) -> None:
    world.reconcile()
    live = world.kube.objects["Deployment", "demo"]
    metadata = {name: value for name, value in live["metadata"].items() if name != "ownerReferences"}
    selector = {"matchLabels": {"app": "theirs"}}
    world.change("Deployment", metadata=metadata, spec={**live["spec"], "selector": selector})
    world.reconcile()
    assert world.ready()["reason"] == "NameConflict"


def test_capacity_message_counts_all_pods_and_lists_them_only_if_needed(document: Any) -> None:
    hardware = {"accelerator": "nvidia-l4", "count": 2}
    world = World(document(hardware=hardware, engine={"image": "x"}))
    node = {"metadata": {"name": "big"}, "spec": {}, "status": {"allocatable": {"nvidia.com/gpu": "4"}}}
    node["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
    requests = []
    cluster = world.cluster
    world.cluster = dataclasses.replace(
        cluster, holders=lambda: requests.append(1) or [Holder("other/job", "big", {"nvidia.com/gpu": 3})]
    )
    world.store.put(world.kube.seen({**node, "kind": "Node"}))
    world.reconcile()
    world.change("Deployment", status={"observedGeneration": 9, "replicas": 1, "updatedReplicas": 1})
    world.reconcile()
    assert not requests
    scheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes"}
    world.pod(conditions=[scheduled])
    # Another writer's object with the operator's label.
    labels = {"app.kubernetes.io/managed-by": "stoker"}
    metadata = {"name": "odd", "namespace": "x", "labels": labels, "creationTimestamp": "2026-01-01T12:00:00Z"}
    container = {"name": "c", "resources": {"limits": {"nvidia.com/gpu": "1"}}}
    odd = {"kind": "Pod", "metadata": metadata, "spec": {"nodeName": "big", "containers": [container]}}
    world.store.put(world.kube.seen(odd))
    world.reconcile()
    assert "1 of 4 free on big, held by other/job (3)" in world.ready()["message"]


def test_endpoint_being_deleted_is_left_to_garbage_collection(world: World) -> None:
    live = world.kube.objects[KIND, "demo"]
    live["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    world.change(KIND)
    assert world.reconcile() == (Outcome.GONE, [])


def test_route_changes_the_network_policy_and_replaces_no_pod(document: Any) -> None:
    world = World(document())
    world.reconcile()
    gateway = GatewaySettings("https://models.example.com", "system", "gateway")
    world.context = dataclasses.replace(
        world.context, route=Route("Routed", "the gateway serves the endpoint", gateway)
    )
    assert world.reconcile()[1] == ["apply NetworkPolicy", "apply InferenceEndpoint/status"]
    assert world.reconcile()[1] == []
    world.context = dataclasses.replace(world.context, route=Route("NameTaken", "it is taken"))
    assert world.reconcile()[1] == ["apply NetworkPolicy", "apply InferenceEndpoint/status"]
