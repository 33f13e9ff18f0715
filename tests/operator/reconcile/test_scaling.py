"""Reconcile of an endpoint with ``spec.scaling``: replicas, status and Events."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from stoker_operator.api.v1alpha1 import KIND
from stoker_operator.scaling.autoscaler import Phase, Recommendation

from .fake_cluster import World

SCALING = {"minReplicas": 0, "maxReplicas": 4, "target": 2}


@pytest.fixture
def scaled(document: Any) -> World:
    made = document()
    made["spec"] |= {"scaling": SCALING, "replicas": 7}
    return World(made)


def recommend(world: World, replicas: int, phase: Phase = Phase.ACTIVE, **changes: Any) -> None:
    made = Recommendation(replicas, phase, "", "DesiredWithinRange", "as the load is", 12.34, "True")
    world.context = dataclasses.replace(world.context, scaling=dataclasses.replace(made, **changes))


def status(world: World) -> Any:
    return world.kube.objects[KIND, "demo"]["status"]


def condition(world: World, kind: str) -> Any:
    return next(each for each in status(world)["conditions"] if each["type"] == kind)


def count(world: World) -> int:
    found: int = world.kube.objects["Deployment", "demo"]["spec"]["replicas"]
    return found


def test_recommended_count_changes_only_the_deployment(scaled: World) -> None:
    scaled.reconcile()
    assert count(scaled) == 1  # a new endpoint starts one pod, to verify the model
    recommend(scaled, 3)
    scaled.reconcile()
    assert count(scaled) == 3
    assert scaled.kube.objects[KIND, "demo"]["spec"]["replicas"] == 7
    assert status(scaled)["desiredReplicas"] == status(scaled)["scaling"]["replicas"] == 3
    assert status(scaled)["scaling"] == {"phase": "Active", "replicas": 3, "startSeconds": 12.3}
    assert (condition(scaled, "Scaling")["status"], condition(scaled, "Scaling")["message"]) == (
        "True",
        "as the load is",
    )


@pytest.mark.parametrize(("live", "expected"), [(0, 0), (3, 3), (9, 4)])
def test_present_count_stays_without_a_recommendation(scaled: World, live: int, expected: int) -> None:
    scaled.reconcile()
    spec = scaled.kube.objects["Deployment", "demo"]["spec"]
    scaled.change("Deployment", spec={**spec, "replicas": live})
    scaled.reconcile()
    assert count(scaled) == expected
    assert condition(scaled, "Scaling")["reason"] == "MissingSignals"


def test_scaling_up_keeps_the_endpoint_ready(scaled: World) -> None:
    scaled.reconcile()
    assert condition(scaled, "Ready")["status"] == "False"
    recommend(scaled, 1)
    scaled.serve()
    scaled.reconcile()
    assert condition(scaled, "Ready")["status"] == "True"
    recommend(scaled, 3)
    scaled.change("Deployment", metadata={**scaled.kube.objects["Deployment", "demo"]["metadata"], "generation": 100})
    scaled.reconcile()  # the Deployment's controller has not seen the new count
    assert condition(scaled, "Ready")["status"] == "True"
    more = {"replicas": 3, "updatedReplicas": 3, "readyReplicas": 1, "availableReplicas": 1, "observedGeneration": 99}
    scaled.change("Deployment", status=more)
    scaled.reconcile()
    assert (condition(scaled, "Ready")["status"], condition(scaled, "Ready")["reason"]) == ("True", "Ready")
    assert "1 of 3" in condition(scaled, "Ready")["message"]


def test_endpoint_stays_ready_at_zero_and_back(scaled: World) -> None:
    scaled.reconcile()
    scaled.serve()
    scaled.reconcile()
    recommend(scaled, 1, Phase.DRAINING, drain="word", reason="Draining")
    scaled.reconcile()
    assert status(scaled)["scaling"] | {"startSeconds": 0} == {
        "phase": "Draining", "drain": "word", "replicas": 1, "startSeconds": 0,
    }  # fmt: skip
    recommend(scaled, 0, Phase.ZERO, drain="word", reason="ScaledToZero")
    scaled.reconcile()
    assert count(scaled) == 0
    scaled.serve()
    scaled.reconcile()
    assert condition(scaled, "Ready")["reason"] == "ScaledToZero"
    scaled.context = dataclasses.replace(scaled.context, scaling=None)  # a new leader without signals
    scaled.reconcile()
    assert status(scaled)["scaling"]["phase"] == "Zero" and status(scaled)["scaling"]["drain"] == "word"
    recommend(scaled, 2)
    scaled.reconcile()
    none = {"replicas": 2, "updatedReplicas": 2, "readyReplicas": 0, "availableReplicas": 0, "observedGeneration": 99}
    scaled.change("Deployment", status=none)
    scaled.reconcile()
    assert (condition(scaled, "Ready")["status"], condition(scaled, "Ready")["reason"]) == ("True", "Waking")
    assert "drain" not in status(scaled)["scaling"]


def test_failed_start_is_reported(scaled: World) -> None:
    scaled.reconcile()
    waiting = {"reason": "ImagePullBackOff", "message": "no such image"}
    scaled.pod(
        phase="Pending",
        containerStatuses=[{"name": "engine", "ready": False, "restartCount": 0, "state": {"waiting": waiting}}],
    )
    starting = {
        "replicas": 1,
        "updatedReplicas": 1,
        "readyReplicas": 0,
        "availableReplicas": 0,
        "observedGeneration": 99,
    }
    scaled.change("Deployment", status=starting)
    scaled.reconcile()
    assert condition(scaled, "Ready")["status"] == "False"
    assert status(scaled)["scaling"]["startFailure"] == condition(scaled, "Ready")["message"]
    scaled.serve()
    scaled.reconcile()
    assert "startFailure" not in status(scaled)["scaling"]


def test_an_outage_is_no_start_from_zero(scaled: World) -> None:
    recommend(scaled, 1)
    scaled.reconcile()
    scaled.serve()
    scaled.reconcile()
    lost = {"replicas": 1, "updatedReplicas": 1, "readyReplicas": 0, "availableReplicas": 0, "observedGeneration": 99}
    scaled.change("Deployment", status=lost)
    scaled.reconcile()
    assert condition(scaled, "Ready")["status"] == "False"


def test_unschedulable_additional_pod_keeps_the_endpoint_ready(scaled: World) -> None:
    recommend(scaled, 2)
    scaled.reconcile()
    scaled.pod(
        phase="Pending",
        conditions=[
            {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no GPU is free"}
        ],
    )
    one = {"replicas": 2, "updatedReplicas": 2, "readyReplicas": 1, "availableReplicas": 1, "observedGeneration": 99}
    scaled.change("Deployment", status=one)
    scaled.reconcile()
    scaled.spec(scaling={**SCALING, "maxReplicas": 3})
    scaled.reconcile()
    assert condition(scaled, "Ready")["status"] == "True"
    assert "no GPU is free" in condition(scaled, "Ready")["message"]
    assert "no GPU is free" in condition(scaled, "Scaling")["message"]
    assert "startFailure" not in status(scaled)["scaling"]


def test_new_bounds_apply_before_the_autoscaler_knows_them(scaled: World) -> None:
    recommend(scaled, 9)
    scaled.reconcile()
    assert count(scaled) == 4


def test_refused_spec_is_reported_as_start_failure(scaled: World) -> None:
    recommend(scaled, 0, Phase.ZERO, drain="word")
    scaled.reconcile()
    scaled.spec(hardware={"accelerator": "no-such-accelerator"})
    recommend(scaled, 1)
    scaled.reconcile()
    assert "no-such-accelerator" in status(scaled)["scaling"]["startFailure"]
    scaled.spec(replicas="many")  # cannot be parsed
    scaled.reconcile()
    assert status(scaled)["scaling"]["startSeconds"] == 12.3


def test_a_change_of_the_count_is_an_event(scaled: World) -> None:
    recommend(scaled, 1)
    scaled.reconcile()
    recommend(scaled, 2)
    _, requests = scaled.reconcile()
    assert "create Event Rescaled" in requests
    _, requests = scaled.reconcile()
    assert "create Event Rescaled" not in requests


def test_another_autoscaler_is_reported(scaled: World) -> None:
    entry = {"manager": "kube-controller-manager", "operation": "Update", "subresource": "scale", "fieldsV1": {}}
    live = scaled.kube.objects[KIND, "demo"]
    scaled.change(KIND, metadata={**live["metadata"], "managedFields": [entry]})
    recommend(scaled, 2)
    scaled.reconcile()
    assert "kube-controller-manager (a HorizontalPodAutoscaler)" in condition(scaled, "Scaling")["message"]
    assert count(scaled) == 2


def test_scaling_changes_no_pod(scaled: World) -> None:
    scaled.reconcile()
    template = scaled.kube.objects["Deployment", "demo"]["spec"]["template"]
    scaled.spec(scaling={**SCALING, "maxReplicas": 2, "target": 9})
    scaled.reconcile()
    scaled.spec(scaling=None)
    scaled.reconcile()
    assert scaled.kube.objects["Deployment", "demo"]["spec"]["template"] == template
    assert count(scaled) == 7
