"""Values reported by engines: when they are requested, and what remains in the status."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest

from stoker_engine.contract.engine_state import EngineState
from stoker_operator.api.v1alpha1 import KIND
from stoker_operator.objects.facts import EngineStates, Reported
from stoker_operator.reconcile.pinning import ANNOTATION
from stoker_operator.reconcile.reconcile import Outcome

from .fake_cluster import KEY, World


def test_engine_that_does_not_report_its_blocks_is_polled_for_a_while(world: World) -> None:
    world.reconcile()
    world.pod(conditions=[{"type": "Ready", "status": "True"}], podIP="10.0.0.9")
    world.serve()
    assert world.reconcile()[0] is Outcome.MOVING
    world.now += timedelta(minutes=3)
    assert world.reconcile()[0] is Outcome.SETTLED
    world.reported = Reported(1234, "fp8_e4m3", "Q8_0, F16")
    for _ in range(2):
        assert world.reconcile()[0] is Outcome.SETTLED
        engine_status = world.kube.objects[KIND, "demo"]["status"]["workloads"][0]["engine"]
        assert (engine_status["kvBlocks"], engine_status["kvCacheDtype"], engine_status["weights"]) == (
            1234,
            "fp8_e4m3",
            "Q8_0, F16",
        )
        world.restart()
        world.reported = None  # reported values stay in the status


def test_pods_with_several_ranks_are_watched(document: Any) -> None:
    world = World(document(parallelism={"tensor": 2, "data": 2}))
    world.reconcile()
    assert world.asked_for_engines[-1] == (KEY, "main", {}), "no pod is ready"
    world.pod(conditions=[{"type": "Ready", "status": "True"}], podIP="10.0.0.9")
    world.serve()
    world.reconcile()
    assert world.asked_for_engines[-1] == (KEY, "main", {"demo-1": "http://10.0.0.9:8000/metrics"})
    world.engines = {"demo-1": EngineStates((EngineState(0, True, 2, kv_blocks=9), EngineState(1, False, 2)))}
    world.reconcile()
    status = world.kube.objects[KIND, "demo"]["status"]
    engine = status["workloads"][0]["engine"]
    assert (engine["copies"], engine["servingCopies"]) == (2, 1)
    assert ("Degraded", "True") in {(each["type"], each["status"]) for each in status["conditions"]}
    world.spec(parallelism={"tensor": 1})
    world.serve()
    world.engines = {}
    world.reconcile()
    assert world.asked_for_engines[-1] == (KEY, "main", {})
    status = world.kube.objects[KIND, "demo"]["status"]
    assert "copies" not in status["workloads"][0]["engine"]
    assert "Degraded" not in {each["type"] for each in status["conditions"]}


@pytest.mark.parametrize("is_recorded", [True, False], ids=["recorded", "of an earlier release"])
def test_pods_are_watched_by_the_plan_they_were_created_with(document: Any, is_recorded: bool) -> None:
    """The running pods decide, not what the spec would render today."""
    world = World(document(parallelism={"tensor": 2}))
    world.reconcile()
    world.pod(conditions=[{"type": "Ready", "status": "True"}], podIP="10.0.0.9")
    world.serve()
    deployment = world.kube.objects["Deployment", "demo"]
    metadata, spec = deployment["metadata"], deployment["spec"]
    record = json.loads(metadata["annotations"][ANNOTATION])
    container = record["template"]["spec"]["containers"][0]
    container["image"] = "engine:older"
    if is_recorded:  # from a release with another name of the argument
        container["args"] = [word.replace("--tensor-parallel-size", "--tp") for word in container["args"]]
    else:
        del record["plan"]
    metadata["annotations"] |= {ANNOTATION: json.dumps(record)}
    world.change("Deployment", metadata=metadata, spec={**spec, "template": record["template"]})
    world.reconcile()
    assert world.kube.objects["Deployment", "demo"]["spec"]["template"]["spec"]["containers"][0] == container
    assert world.asked_for_engines[-1] == (KEY, "main", {"demo-1": "http://10.0.0.9:8000/metrics"})


def test_engine_is_polled_again_after_an_upgrade(world: World) -> None:
    def engine_status() -> dict[str, Any]:
        world.reconcile()
        found: dict[str, Any] = world.kube.objects[KIND, "demo"]["status"]["workloads"][0]["engine"]
        return {name: value for name, value in found.items() if name != "args"}

    world.reconcile()
    world.pod(conditions=[{"type": "Ready", "status": "True"}], podIP="10.0.0.9")
    world.serve()
    world.reported = Reported(1234)
    assert engine_status() == {"kvBlocks": 1234}  # the only value that an earlier operator recorded
    world.restart()
    world.reported = None
    assert engine_status() == {"kvBlocks": 1234}
    world.reported = Reported(1234, "float32", "F16")
    assert engine_status() == {"kvBlocks": 1234, "kvCacheDtype": "float32", "weights": "F16"}
    world.reported = Reported(99, "bfloat16", "Q8_0")
    assert engine_status()["kvBlocks"] == 1234
    world.spec(engine={"image": "another:1"})  # the same arguments for another engine
    world.reconcile()
    world.serve()
    assert engine_status() == {"kvBlocks": 99, "kvCacheDtype": "bfloat16", "weights": "Q8_0"}


def test_other_runtimes_do_not_report_their_weights(document: Any) -> None:
    engine = {"runtime": "vllm", "image": "vllm/vllm-openai-cpu:v0"}
    world = World(document(model={"source": "pvc://models/mine"}, engine=engine))
    world.reconcile()
    world.pod(conditions=[{"type": "Ready", "status": "True"}], podIP="10.0.0.9")
    world.serve()
    world.reported = Reported(1234, "auto")
    for _ in range(2):
        world.reconcile()
        engine_status = world.kube.objects[KIND, "demo"]["status"]["workloads"][0]["engine"]
        assert (engine_status["kvBlocks"], engine_status["kvCacheDtype"]) == (1234, "auto")
        world.reported = Reported(99)  # it is not polled again
