"""An object that the API server refuses does not block others, and the spec that caused it can be reverted."""

from __future__ import annotations

from typing import Any

import pytest

from stoker_operator.api.v1alpha1 import KIND
from stoker_operator.manager.controller import Controller
from stoker_operator.plan.catalogue import Catalogue
from stoker_operator.settings import Settings

from .fake_cluster import World

KINDS = ("ServiceAccount", "PersistentVolumeClaim", "Service", "NetworkPolicy", "PodDisruptionBudget")


def cache(size: str) -> dict[str, Any]:
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": size}}}
    return {"cache": {"volumeClaimTemplate": {"spec": spec}}}


@pytest.fixture
def world(document: Any) -> World:
    return World(document(storage=cache("1Gi"), replicas=2))


@pytest.mark.parametrize("kind", KINDS)
def test_a_refused_change_blocks_no_other(world: World, kind: str) -> None:
    world.reconcile()
    metadata = world.kube.objects[kind, "demo"]["metadata"]
    world.change(kind, metadata={**metadata, "labels": {**metadata["labels"], "app.kubernetes.io/managed-by": "x"}})
    world.kube.refuse[kind] = "this one cannot be changed"
    world.spec(replicas=3)
    world.reconcile()
    assert world.kube.objects["Deployment", "demo"]["spec"]["replicas"] == 3
    assert (world.ready()["status"], world.ready()["reason"]) == ("False", "ApplyFailed")
    assert "this one cannot be changed" in world.ready()["message"]


@pytest.mark.parametrize("kind", KINDS)
def test_pods_are_not_created_without_their_objects(world: World, kind: str) -> None:
    world.kube.refuse[kind] = "exceeded quota"
    world.reconcile()
    assert ("Deployment", "demo") not in world.kube.objects
    assert {("Service", "demo"), ("ServiceAccount", "demo")} - {(kind, "demo")} <= world.kube.objects.keys()
    assert world.ready()["reason"] == "QuotaExceeded"
    world.kube.refuse.clear()
    world.reconcile()
    assert ("Deployment", "demo") in world.kube.objects


def test_growth_refused_by_the_storage_class_can_be_reverted(world: World) -> None:
    world.reconcile()
    world.serve()
    world.kube.refuse["PersistentVolumeClaim"] = "only dynamically provisioned pvc can be resized"
    world.spec(storage=cache("2Gi"))
    world.reconcile()
    assert world.ready()["reason"] == "ApplyFailed"
    world.spec(storage=cache("1Gi"))
    world.reconcile()
    assert world.ready()["reason"] == "Ready"


@pytest.mark.parametrize(
    ("requested", "has", "to", "refused"),
    [
        ("1Gi", "1Gi", "2Gi", False),
        ("3Gi", "1Gi", "2Gi", False),  # the expansion failed; the new size must be more than the capacity
        ("2Gi", "1Gi", "1Gi", True),
        ("2Gi", "1Gi", "1000Mi", True),
        ("1Gi", "5Gi", "1024Mi", False),
        ("1Gi", "5Gi", "2Gi", False),
        ("1Gi", None, "500Mi", False),
    ],
)
def test_webhook_compares_a_new_size_with_the_volume(
    world: World, requested: str, has: str | None, to: str, refused: bool
) -> None:
    world.reconcile()
    claim = world.kube.objects["PersistentVolumeClaim", "demo"]
    claim["spec"]["resources"]["requests"]["storage"] = requested
    world.change("PersistentVolumeClaim", status={"capacity": {"storage": has}} if has else {})
    operator = Controller(Settings(), world.kube, Catalogue.load())
    operator._informer.relist()
    before = world.kube.objects[KIND, "demo"]
    after = {**before, "spec": {**before["spec"], "storage": cache(to)}}
    violations = operator._reviews.check(after, before).violations
    assert [each.reason for each in violations] == (["Immutable"] if refused else [])
