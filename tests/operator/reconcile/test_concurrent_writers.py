"""Concurrent writes: stale facts, lost leadership, changed objects."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from stoker_operator.api.v1alpha1 import KIND
from stoker_operator.cluster.kube import KubeError
from stoker_operator.cluster.store import Store
from stoker_operator.objects.owner import GENERATION, INSTANCE
from stoker_operator.reconcile.apply import MANAGER, NotLeading, Writer
from stoker_operator.reconcile.cluster import Cluster
from stoker_operator.reconcile.pinning import ANNOTATION
from stoker_operator.reconcile.reconcile import Outcome

from .fake_cluster import KEY, World


def test_former_leader_writes_nothing(world: World) -> None:
    world.leading = False
    with pytest.raises(NotLeading):
        world.reconcile()
    assert not [each for each in world.kube.requests if not each.startswith("get")]


def test_foreign_changes_of_the_deployment_are_reverted(world: World) -> None:
    world.reconcile()
    live = world.kube.objects["Deployment", "demo"]
    record = json.loads(live["metadata"]["annotations"][ANNOTATION])
    assert record["template"] == live["spec"]["template"]
    changed = copy.deepcopy(live["spec"])
    changed["template"]["spec"]["containers"][0]["image"] = "theirs"
    world.change("Deployment", spec=changed)
    _, requests = world.reconcile()
    assert requests == ["apply Deployment"]


def test_spec_change_just_before_our_status_is_not_lost(world: World) -> None:
    """It is part of the response to the operator's write, so the watch brings no event about it."""
    world.reconcile()
    world.serve()
    apply = world.kube.apply

    def change_first(body: Any, *words: Any, **options: Any) -> Any:
        if body["kind"] == KIND:
            world.kube.apply = apply
            live = world.kube.objects[KIND, "demo"]
            live["metadata"]["generation"] += 1
            world.kube.seen({**live, "spec": {**live["spec"], "replicas": 3}})
        return apply(body, *words, **options)

    world.kube.apply = change_first
    assert world.reconcile()[0] is Outcome.CHANGED
    assert not world.store.put(world.kube.objects[KIND, "demo"]), "the watch's event brings nothing new"
    world.reconcile()
    assert world.kube.objects["Deployment", "demo"]["spec"]["replicas"] == 3


def test_stale_spec_is_not_rendered_over_a_newer_deployment(world: World) -> None:
    """A standby with a delayed watch of endpoints becomes the leader."""
    world.reconcile()
    world.serve()
    stale = world.store.get(KIND, *KEY)
    world.spec(engine={"maxNumSeqs": 4}, replicas=2)
    world.reconcile()
    before = copy.deepcopy(world.kube.objects["Deployment", "demo"])
    world.store = Store(MANAGER, INSTANCE)
    for live in world.kube.objects.values():
        world.store.put(live if live["kind"] != KIND else stale)
    world.cluster = Cluster(world.kube, world.store, Writer(world.kube, world.store))
    _, requests = world.reconcile()
    assert requests[0] == f"list {KIND}"
    assert not [each for each in requests if each.startswith("apply") and "status" not in each]
    assert world.kube.objects["Deployment", "demo"] == before
    del world.kube.objects[KIND, "demo"]
    world.store.put(stale)
    assert world.reconcile() == (Outcome.GONE, [f"list {KIND}"]), "a deleted endpoint is not rendered"


def test_write_from_a_stale_deployment_is_refused_by_the_api_server(world: World) -> None:
    """The old leader's request was in flight when the next one took over: endpoint and Deployment are both stale."""
    world.reconcile()
    seen = {kind: world.store.get(kind, *KEY) for kind in (KIND, "Deployment")}
    world.spec(engine={"maxNumSeqs": 4})
    world.reconcile()
    before = copy.deepcopy(world.kube.objects["Deployment", "demo"])
    world.store = Store(MANAGER, INSTANCE)
    deployment: Any = copy.deepcopy(seen["Deployment"])
    deployment["spec"]["replicas"] = 7  # something to correct
    for live in (seen[KIND], deployment, *(world.kube.objects[each, "demo"] for each in ("Service", "ServiceAccount"))):
        world.store.put(live)
    world.cluster = Cluster(world.kube, world.store, Writer(world.kube, world.store))
    with pytest.raises(KubeError, match="modified"):
        world.reconcile()
    assert world.kube.objects["Deployment", "demo"] == before
    world.reconcile()
    assert world.kube.objects["Deployment", "demo"] == before, "the next reconcile uses the current spec"


def test_status_change_during_a_write_causes_no_conflict(world: World) -> None:
    world.reconcile()
    live = world.kube.objects["Deployment", "demo"]
    world.kube.seen({**live, "status": {"replicas": 1}})  # no watch event has arrived yet
    world.spec(replicas=3)
    world.reconcile()
    live = world.kube.objects["Deployment", "demo"]
    assert live["spec"]["replicas"] == 3
    assert live["metadata"]["annotations"][GENERATION] == "2"


def test_forged_generation_annotation_stops_nothing(world: World) -> None:
    world.reconcile()
    for made_up in ("99", "many", "-1", "²", "9" * 30):
        metadata = world.kube.objects["Deployment", "demo"]["metadata"]
        annotations = {**metadata["annotations"], GENERATION: made_up}
        world.change("Deployment", metadata={**metadata, "annotations": annotations}, spec={"replicas": 5})
        world.reconcile()
        live = world.kube.objects["Deployment", "demo"]
        assert (live["metadata"]["annotations"][GENERATION], live["spec"]["replicas"]) == ("1", 1)


def test_new_generation_with_an_equal_deployment_writes_none(world: World) -> None:
    world.reconcile()
    world.spec(service={"port": 9000})
    _, requests = world.reconcile()
    assert "apply Service" in requests and "apply Deployment" not in requests
