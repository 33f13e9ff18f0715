"""New pods wait for a model's pending config.json; serving pods are never removed."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from stoker_operator.api.v1alpha1 import KIND
from stoker_operator.plan.model_shapes import table
from stoker_operator.reconcile.evaluate import PlanningContext
from stoker_operator.reconcile.reconcile import Outcome

from .fake_cluster import World

LARGE, SMALL = table()["meta-llama/Llama-3.1-70B-Instruct"], table()["meta-llama/Llama-3.2-1B-Instruct"]


class Hub:
    """A model's config that is being fetched."""

    def __init__(self) -> None:
        self.config: Any = None
        self.pending = True

    def world(self, document: Any, **spec: Any) -> World:
        model = {"source": "hf://org/model"}
        hardware = {"accelerator": "nvidia-l4", "count": 1}
        made = World(document(model=model, hardware=hardware, engine={"image": "x"}, **spec))
        made.context = PlanningContext(
            made.context.catalogue, lambda *_: self.config, pending=lambda *_: self.pending and self.config is None
        )
        return made


@pytest.mark.parametrize("config", [SMALL, None], ids=["config arrives", "config does not arrive"])
def test_first_pods_wait_for_the_first_attempt(document: Any, config: Any) -> None:
    hub = Hub()
    world = hub.world(document)
    outcome, requests = world.reconcile()
    assert (outcome, requests[:1]) == (Outcome.HELD, [f"apply {KIND}/status"])
    assert world.reconcile() == (Outcome.HELD, []), "waiting costs no request"
    assert world.ready()["reason"] == "RollingOut"
    hub.config, hub.pending = config, False
    assert world.reconcile()[0] is Outcome.MOVING
    timely = World(world.document)
    timely.context = world.context
    timely.reconcile()
    made = [each.kube.objects["Deployment", "demo"]["spec"] for each in (world, timely)]
    assert made[0] == made[1]


def test_changed_spec_waits_and_running_pods_stay(document: Any) -> None:
    hub = Hub()
    world = hub.world(document)
    hub.config = SMALL
    world.reconcile()
    world.serve()
    hub.config = None
    world.spec(replicas=2)
    assert world.reconcile()[0] is not Outcome.HELD, "the pods of this spec are known"
    world.serve()
    world.reconcile()
    world.spec(model={"source": "hf://org/other"})
    outcome, requests = world.reconcile()
    assert (outcome, "apply Deployment" in requests) == (Outcome.HELD, False)
    assert world.ready()["status"] == "False"
    hub.config = LARGE
    _, requests = world.reconcile()
    assert world.ready()["reason"] == "DoesNotFit"
    assert not [each for each in requests if each.startswith("delete")], "serving pods stay"


def test_pods_that_cannot_fit_are_removed_after_a_late_config(document: Any) -> None:
    hub = Hub()
    world = hub.world(document)
    hub.pending = False
    world.reconcile()
    hub.config = LARGE
    _, requests = world.reconcile()
    assert [each for each in requests if each.startswith(("delete", "apply"))] == [
        "delete Deployment",
        f"apply {KIND}/status",
    ]
    assert world.ready()["reason"] == "DoesNotFit"
    assert world.reconcile() == (Outcome.SETTLED, [])


@pytest.mark.parametrize("evidence", ["serves", "was complete", "was reported", "another spec"])
def test_pods_that_once_served_are_never_removed(document: Any, evidence: str) -> None:
    hub = Hub()
    world = hub.world(document)
    hub.pending = False
    world.reconcile()
    if evidence == "serves":
        world.change("Deployment", status={"readyReplicas": 1})
    elif evidence == "was complete":
        progressing = {"type": "Progressing", "status": "True", "reason": "NewReplicaSetAvailable"}
        world.change("Deployment", status={"conditions": [progressing]})
    elif evidence == "was reported":
        world.serve()
        world.now += timedelta(minutes=5)
        world.reconcile()
        world.change("Deployment", status={})
        world.now += timedelta(minutes=5)
        world.reconcile()
    else:
        world.spec(model={"source": "hf://org/other"})
    hub.config = LARGE
    _, requests = world.reconcile()
    assert world.ready()["reason"] == "DoesNotFit"
    assert not [each for each in requests if each.startswith("delete")]


@pytest.mark.parametrize("lookups", range(8))
def test_config_that_arrives_during_an_evaluation_counts(document: Any, lookups: int) -> None:
    hub = Hub()
    world = hub.world(document)
    left = lookups

    def look(*_: Any) -> Any:
        nonlocal left
        hub.config = LARGE if left <= 0 else None
        left -= 1
        return hub.config

    world.context = PlanningContext(
        world.context.catalogue, look, pending=lambda *_: hub.pending and left > 0 and hub.config is None
    )
    _, requests = world.reconcile()
    assert "apply Deployment" not in requests, "pods that cannot fit hold no accelerator"
