"""Conditions as a function of facts and decision."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from stoker_engine.contract.engine_state import EngineState
from stoker_operator.objects.facts import MAIN, Child, Endpoint, EngineStates, Key, Reported, Rollout
from stoker_operator.objects.owner import Owner
from stoker_operator.plan.catalogue import Catalogue
from stoker_operator.reconcile.decide import Decision, decide
from stoker_operator.reconcile.diagnosis import Diagnosis
from stoker_operator.reconcile.evaluate import PlanningContext, evaluate
from stoker_operator.reconcile.observed import Observed, ObservedWorkload
from stoker_operator.reconcile.routing import Route
from stoker_operator.reconcile.status import status
from stoker_operator.settings import GatewaySettings
from stoker_operator.workloads.deployment import DEPLOYMENT

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
LATER = datetime(2026, 1, 1, 13, tzinfo=UTC)
DONE = Rollout(current=True, desired=2, total=2, updated=2, ready=2, available=2)
HALF = Rollout(current=True, desired=2, total=3, updated=1, ready=2, available=2)
NONE = Rollout(current=True, desired=0, total=0, updated=0, ready=0, available=0)
OWNER = Owner("demo", "default", "uid-1")


def facts(document: Any, **before: Any) -> Endpoint:
    return Endpoint(Key("default", "demo"), "uid-1", 7, False, document, before)


def ours(kind: str) -> dict[str, Any]:
    reference = {"uid": "uid-1", "controller": True, "kind": "InferenceEndpoint", "name": "demo"}
    return {"kind": kind, "metadata": {"ownerReferences": [reference]}}


def decided(endpoint: Endpoint, live: Any, catalogue: Catalogue, access_modes: Any = None) -> Decision:
    evaluation = evaluate(OWNER, endpoint.document, PlanningContext(catalogue))
    return decide(endpoint, OWNER, evaluation, live, access_modes or {}, "stoker")


def report(
    document: Any,
    catalogue: Catalogue,
    rollout: Rollout | None = DONE,
    *,
    trouble: Diagnosis | None = None,
    refusal: str = "",
    live: Any = None,
    before: Any = None,
    now: datetime = NOON,
    reported: Reported | None = None,
    access_modes: Any = None,
    engines: Any = None,
    route: Route | None = None,
) -> dict[str, Any]:
    endpoint = facts(document, **(before or {}))
    live = {Child("Service"): ours("Service")} if live is None else live
    decision = decided(endpoint, live, catalogue, access_modes)
    workloads = {MAIN: ObservedWorkload(rollout, trouble, reported, engines=engines or {})} if rollout else {}
    return status(endpoint, decision, Observed(live, refusal, workloads, route), now)


def condition(reported: dict[str, Any], kind: str) -> tuple[str, str]:
    found = next(each for each in reported["conditions"] if each["type"] == kind)
    assert found["observedGeneration"] == 7
    assert found["message"]
    return found["status"], found["reason"]


def message(reported: dict[str, Any], kind: str = "Ready") -> str:
    return next(str(each["message"]) for each in reported["conditions"] if each["type"] == kind)


def test_serving_endpoint_is_ready(document: Any, catalogue: Catalogue) -> None:
    engine_facts = Reported(1234, "fp8_e4m3", "int8 in groups of 128")
    reported = report(document(replicas=2), catalogue, reported=engine_facts)
    assert [each["type"] for each in reported["conditions"]] == [
        "Accepted", "Planned", "Available", "Progressing", "Stalled", "Ready",
    ]  # fmt: skip
    assert {each["type"]: condition(reported, each["type"]) for each in reported["conditions"]} == {
        "Accepted": ("True", "Accepted"),
        "Planned": ("True", "Planned"),
        "Available": ("True", "Available"),
        "Progressing": ("False", "RolledOut"),
        "Stalled": ("False", "NotStalled"),
        "Ready": ("True", "Ready"),
    }
    assert reported["url"] == "http://demo.default.svc:8000/v1"
    assert reported["addresses"] == [{"name": "cluster", "url": reported["url"]}]
    assert reported["observedGeneration"] == 7
    (workload,) = reported["workloads"]
    assert (workload["name"], workload["runtime"], workload["image"]) == ("main", "stoker", "stoker/engine-cpu:0.1.0")
    assert (workload["plan"]["tensor"], workload["plan"]["pipeline"], workload["plan"]["data"]) == (1, 1, 1)
    assert workload["plan"]["weightBytesPerGpu"] > 0
    assert workload["engine"]["args"][:2] == ["serve", "demo://gemma-3-270m"]
    assert workload["engine"]["kvBlocks"] == 1234
    assert workload["engine"]["kvCacheDtype"] == "fp8_e4m3"
    assert workload["engine"]["weights"] == "int8 in groups of 128"
    assert reported["selector"].startswith("app.kubernetes.io/name=stoker-engine,app.kubernetes.io/instance=demo")


def test_serving_engines_are_counted(document: Any, catalogue: Catalogue) -> None:
    each = tuple(EngineState(number, True, 2, (), "serving", 100, 1600) for number in range(2))
    manifest = document(replicas=2, parallelism={"tensor": 2, "data": 2})
    reported = report(manifest, catalogue, engines={"b": EngineStates(each), "a": EngineStates(each)})
    engine = reported["workloads"][0]["engine"]
    assert (engine["copies"], engine["servingCopies"]) == (4, 4)
    assert [(state["pod"], state["number"]) for state in engine["copyStates"]] == [
        ("a", 0),
        ("a", 1),
        ("b", 0),
        ("b", 1),
    ]
    assert engine["copyStates"][0] == {
        "pod": "a",
        "number": 0,
        "serves": True,
        "ranks": 2,
        "kvBlocks": 100,
        "kvTokens": 1600,
    }
    assert condition(reported, "Degraded") == ("False", "EveryCopyServes")
    assert condition(reported, "Ready") == ("True", "Ready")


def test_engine_that_does_not_serve_degrades_the_endpoint_and_its_pod_is_ready(
    document: Any, catalogue: Catalogue
) -> None:
    engines = {
        "a": EngineStates(
            (EngineState(0, True, 4), EngineState(1, False, 4, (2, 3), "loading again after: rank 2 was killed"))
        ),
        "b": EngineStates((EngineState(0, True, 4), EngineState(1, True, 4))),
    }
    reported = report(document(replicas=2, parallelism={"data": 2}), catalogue, engines=engines)
    assert condition(reported, "Degraded") == ("True", "CopyDown")
    assert message(reported, "Degraded").startswith(
        "pod a: 1 of 2 engines does not accept requests: engine 1 lacks ranks 2, 3 of 4: "
        "loading again after: rank 2 was killed; the pod's other"
    )
    assert condition(reported, "Ready") == ("True", "Ready"), "every replica serves"
    engine = reported["workloads"][0]["engine"]
    assert (engine["copies"], engine["servingCopies"]) == (4, 3)
    assert engine["copyStates"][0] == {
        "pod": "a",
        "number": 1,
        "serves": False,
        "ranks": 4,
        "missingRanks": [2, 3],
        "message": "loading again after: rank 2 was killed",
    }
    back = report(document(replicas=2, parallelism={"data": 2}), catalogue, before=reported, now=LATER, engines={})
    assert "Degraded" not in {each["type"] for each in back["conditions"]}


def test_readiness_explains_a_pod_without_serving_engines(document: Any, catalogue: Catalogue) -> None:
    engines = {"a": EngineStates((EngineState(0, False, 2, (1,), "loading: reading the model", 100),))}
    moving = Rollout(current=True, desired=1, total=1, updated=1, ready=0, available=0)
    reported = report(document(parallelism={"tensor": 2}), catalogue, moving, engines=engines)
    assert condition(reported, "Ready") == ("False", "RollingOut")
    assert message(reported, "Ready").endswith("; pod a: engine 0 lacks rank 1 of 2: loading: reading the model")
    assert "Degraded" not in {each["type"] for each in reported["conditions"]}
    assert reported["workloads"][0]["engine"]["copyStates"][0]["missingRanks"] == [1]


def test_messages_about_many_engines_are_short(document: Any, catalogue: Catalogue) -> None:
    lost = EngineStates(tuple(EngineState(number, number % 2 == 0, message="x" * 400) for number in range(16)))
    reported = report(document(replicas=2), catalogue, engines={f"pod-{number}": lost for number in range(50)})
    engine = reported["workloads"][0]["engine"]
    assert (engine["copies"], engine["servingCopies"], len(engine["copyStates"])) == (800, 400, 64)
    assert not any(state["serves"] for state in engine["copyStates"])
    assert "8 of 16 engines do not accept requests: engine 1: xx" in message(reported, "Degraded")
    assert "; and 6 more; pod" in message(reported, "Degraded")
    assert "the same in 47 more pods" in message(reported, "Degraded")


def test_model_of_unknown_shape_runs(document: Any, catalogue: Catalogue) -> None:
    reported = report(document(model={"source": "pvc://weights/llama"}), catalogue)
    assert condition(reported, "Planned") == ("Unknown", "ModelUnknown")
    assert condition(reported, "Ready") == ("True", "Ready")
    assert reported["workloads"][0]["plan"] == {"tensor": 1, "pipeline": 1, "data": 1, "nodes": 1, "idle": 0}


@pytest.mark.parametrize(
    ("parallelism", "expected"),
    [
        ({"tensor": 2, "data": 2, "expert": 4}, {"expert": 4, "nodes": 1, "idle": 0}),
        ({"tensor": 2, "data": 1}, {"nodes": 1, "idle": 2}),
        ({"tensor": 1, "data": 3, "expert": 3}, {"expert": 3, "nodes": 1, "idle": 1}),
        ({"tensor": 4}, {"nodes": 1, "idle": 0}),
    ],
)
def test_idle_accelerators_and_expert_parallelism_are_reported(
    document: Any, catalogue: Catalogue, parallelism: Any, expected: Any
) -> None:
    hardware = {"accelerator": "nvidia-h100-80gb", "count": 4, "allowIdle": True}
    engine = {"runtime": "vllm", "image": "v"}
    manifest = document(model={"source": "pvc://w"}, hardware=hardware, engine=engine, parallelism=parallelism)
    plan = report(manifest, catalogue)["workloads"][0]["plan"]
    assert {name: plan[name] for name in ("expert", "nodes", "idle") if name in plan} == expected


def test_choice_of_mode_auto_is_reported(document: Any, catalogue: Catalogue) -> None:
    auto = {"parallelism": {"mode": "Auto"}, "engine": {"runtime": "vllm"}}
    hardware = {"hardware": {"accelerator": "nvidia-h100-80gb", "count": 8}}
    known = {"source": "hf://meta-llama/Meta-Llama-3-70B-Instruct"}
    reported = report(document(model=known, **hardware, **auto), catalogue)
    planned = reported["workloads"][0]["plan"]
    assert (planned["tensor"], planned["data"]) == (4, 2)
    assert message(reported, "Planned").startswith(
        "each pod runs tensor 4, data 2, as spec.parallelism.mode Auto chose"
    )
    reported = report(document(model={"source": "pvc://weights/llama"}, **hardware, **auto), catalogue)
    planned = reported["workloads"][0]["plan"]
    assert (planned["tensor"], planned["data"]) == (8, 1)
    assert condition(reported, "Planned") == ("Unknown", "ModelUnknown")
    assert "uses all accelerators for tensor, because the model's shape is unknown" in message(reported, "Planned")


def test_load_balancer_addresses_are_reported(document: Any, catalogue: Catalogue) -> None:
    service = {
        **ours("Service"),
        "status": {"loadBalancer": {"ingress": [{"ip": "192.0.2.7"}, {"hostname": "lb.net"}]}},
    }
    reported = report(document(service={"port": 80}), catalogue, live={Child("Service"): service})
    assert reported["addresses"][1:] == [
        {"name": "loadBalancer", "url": "http://192.0.2.7:80/v1"},
        {"name": "loadBalancer-2", "url": "http://lb.net:80/v1"},
    ]


def test_endpoint_that_rolls_is_available_and_not_ready(document: Any, catalogue: Catalogue) -> None:
    reported = report(document(), catalogue, HALF)
    assert condition(reported, "Available") == ("True", "Available")
    assert condition(reported, "Progressing") == ("True", "RollingOut")
    assert condition(reported, "Ready") == ("False", "RollingOut")
    assert condition(reported, "Stalled") == ("False", "NotStalled")


def test_pod_that_became_unready_is_no_rollout(document: Any, catalogue: Catalogue) -> None:
    trouble = Diagnosis("ContainersNotReady", "pod demo-1 has started and is not ready")
    lost = Rollout(current=True, desired=2, total=2, updated=2, ready=1, available=1, served=True)
    reported = report(document(replicas=2), catalogue, lost, trouble=trouble)
    assert condition(reported, "Progressing") == ("False", "RolledOut")
    assert condition(reported, "Ready") == ("False", "ContainersNotReady")
    # Starting pods, for example after an increase of spec.replicas, are reported.
    assert condition(report(document(replicas=2), catalogue, lost), "Progressing") == ("True", "RollingOut")


def test_just_changed_deployment_is_not_complete() -> None:
    numbers = {"replicas": 1, "updatedReplicas": 1, "readyReplicas": 1, "availableReplicas": 1}
    deployment = {
        "metadata": {"generation": 2},
        "spec": {"replicas": 1},
        "status": {**numbers, "observedGeneration": 1},
    }
    assert not DEPLOYMENT.rollout([deployment]).complete


def test_endpoint_with_zero_replicas_is_ready(document: Any, catalogue: Catalogue) -> None:
    reported = report(document(replicas=0), catalogue, NONE)
    assert condition(reported, "Ready") == ("True", "ScaledToZero")
    assert condition(reported, "Available") == ("False", "NoPodServes")


def test_refused_spec_keeps_running_pods(document: Any, catalogue: Catalogue) -> None:
    before = {"workloads": [{"name": "main", "image": "old", "plan": {"tensor": 1, "data": 1}}]}
    wrong = document(hardware={"accelerator": "no-such"})
    reported = report(wrong, catalogue, before=before)
    assert condition(reported, "Accepted") == ("False", "UnknownAccelerator")
    assert condition(reported, "Planned") == ("Unknown", "NotAccepted")
    assert condition(reported, "Available") == ("True", "Available")
    assert condition(reported, "Progressing") == ("False", "UnknownAccelerator")
    assert condition(reported, "Stalled") == ("True", "UnknownAccelerator")
    assert condition(reported, "Ready") == ("False", "UnknownAccelerator")
    assert reported["workloads"] == before["workloads"]
    assert decided(facts(wrong), {}, catalogue).objects == ()


def test_model_that_does_not_fit_is_accepted_and_not_planned(document: Any, catalogue: Catalogue) -> None:
    spec = {
        "model": {"source": "hf://meta-llama/Meta-Llama-3-70B-Instruct"},
        "hardware": {"accelerator": "nvidia-h100-80gb", "count": 1},
        "engine": {"image": "x"},
    }
    reported = report(document(**spec), catalogue, None, live={})
    assert condition(reported, "Accepted") == ("True", "Accepted")
    planned, reason = condition(reported, "Planned")
    assert planned == "False"
    assert condition(reported, "Ready") == ("False", reason)
    assert condition(reported, "Stalled") == ("True", reason)
    assert "spec." in message(reported)


def test_spec_of_another_version_is_refused_without_internal_error(document: Any, catalogue: Catalogue) -> None:
    reported = report(document(surprise=1), catalogue)
    assert condition(reported, "Ready") == ("False", "Invalid")


def test_refusals_of_the_api_server_are_reported(document: Any, catalogue: Catalogue) -> None:
    reported = report(document(), catalogue, None, refusal="memory limit must be at least the request")
    assert condition(reported, "Ready") == ("False", "ApplyFailed")
    assert condition(reported, "Stalled") == ("True", "ApplyFailed")
    assert "at least the request" in message(reported)
    # The refused spec is the newest, so an older one serves.
    reported = report(document(), catalogue, DONE, refusal='services "demo" is forbidden: exceeded quota: team')
    assert condition(reported, "Ready") == ("False", "QuotaExceeded")
    assert condition(reported, "Stalled") == ("False", "NotStalled")
    assert condition(reported, "Available") == ("True", "Available")


@pytest.mark.parametrize(
    ("references", "words", "stalled"),
    [
        ([], "was not created by Stoker and is not changed; delete it", "True"),
        ([{"uid": "u", "kind": "App", "name": "x", "controller": True}], "belongs to App x and is not changed", "True"),
        (
            [{"uid": "uid-0", "kind": "InferenceEndpoint", "name": "demo", "controller": True}],
            "belongs to an earlier endpoint of this name, and is being deleted",
            "False",
        ),
    ],
)
def test_object_of_another_owner_is_left_alone(
    document: Any, catalogue: Catalogue, references: Any, words: str, stalled: str
) -> None:
    service = {"kind": "Service", "metadata": {"name": "demo", "ownerReferences": references}}
    live = {Child("Service"): service}
    assert decided(facts(document()), live, catalogue).objects == ()
    reported = report(document(), catalogue, None, live=live)
    assert condition(reported, "Ready") == ("False", "NameConflict")
    assert condition(reported, "Stalled")[0] == stalled
    assert words in message(reported)
    assert "url" not in reported


@pytest.mark.parametrize(
    "named",
    [
        {"storage": {"cache": {"persistentVolumeClaim": {"claimName": "weights"}}}},
        {"model": {"source": "pvc://weights/llama"}},
    ],
    ids=["cache", "model"],
)
def test_a_claim_that_pods_cannot_share_is_refused(document: Any, catalogue: Catalogue, named: Any) -> None:
    reported = report(document(replicas=2, **named), catalogue, access_modes={"weights": ("ReadWriteOnce",)})
    assert condition(reported, "Accepted")[0] == "False"
    assert "ReadWriteMany" in message(reported)
    reported = report(document(replicas=2, **named), catalogue, access_modes={"weights": ("ReadWriteMany",)})
    assert condition(reported, "Ready") == ("True", "Ready")


def test_a_condition_keeps_the_time_of_its_last_change(document: Any, catalogue: Catalogue) -> None:
    first = report(document(), catalogue, HALF)
    second = report(document(), catalogue, DONE, before=first, now=LATER)
    times = {each["type"]: each["lastTransitionTime"] for each in second["conditions"]}
    assert times["Ready"] == "2026-01-01T13:00:00Z"
    assert times["Available"] == "2026-01-01T12:00:00Z"
    assert report(document(), catalogue, DONE, before=second, now=datetime(2027, 1, 1, tzinfo=UTC)) == second


def test_problem_is_reported_until_it_is_over(document: Any, catalogue: Catalogue) -> None:
    trouble = Diagnosis("ModelNotFound", "there is no such model; check spec.model.source", lasting=True)
    reported = report(document(), catalogue, HALF, trouble=trouble)
    for kind, expected in (("Ready", "False"), ("Stalled", "True"), ("Progressing", "False")):
        assert condition(reported, kind) == (expected, "ModelNotFound")
    assert condition(reported, "Available") == ("True", "Available")
    healed = report(document(), catalogue, DONE, before=reported)
    assert condition(healed, "Ready") == ("True", "Ready")
    assert "ModelNotFound" not in str(healed)

    passing = Diagnosis("ImagePullError", "the registry is away")
    reported = report(document(), catalogue, HALF, trouble=passing)
    assert condition(reported, "Stalled") == ("False", "NotStalled")
    assert condition(reported, "Progressing") == ("True", "RollingOut")


def test_waiting_newer_image_is_reported(document: Any, catalogue: Catalogue) -> None:
    first = decided(facts(document()), {}, catalogue)
    assert first.pinned
    deployment = {**ours("Deployment"), **first.pinned[MAIN].objects[0]}
    deployment["metadata"] |= ours("Deployment")["metadata"]
    live = {Child("Service"): ours("Service"), Child("Deployment"): deployment}
    newer = catalogue.model_copy(update={"runtimes": {**catalogue.runtimes, "stoker": {"cpu": "engine:2"}}})
    reported = report(document(), newer, live=live)
    assert condition(reported, "Ready") == ("True", "Ready")
    assert condition(reported, "Progressing") == ("False", "NewerImageWaiting")
    assert "engine:2" in message(reported, "Progressing")
    assert reported["workloads"][0]["image"] == "stoker/engine-cpu:0.1.0"
    always = report(document(rollout={"imageUpdates": "Always"}), newer, live=live)
    assert always["workloads"][0]["image"] == "engine:2"


def test_all_objects_are_owned_by_the_endpoint(document: Any, catalogue: Catalogue) -> None:
    decision = decided(facts(document(replicas=2)), {}, catalogue)
    assert [each["kind"] for each in decision.objects] == [
        "ServiceAccount", "Service", "NetworkPolicy", "PodDisruptionBudget", "Deployment",
    ]  # fmt: skip
    for each in decision.objects:
        (reference,) = each["metadata"]["ownerReferences"]
        assert (reference["uid"], reference["controller"], reference["blockOwnerDeletion"]) == ("uid-1", True, True)
        assert each["metadata"]["namespace"] == "default"


def test_unneeded_objects_are_deleted_except_claims(document: Any, catalogue: Catalogue) -> None:
    live = {Child(kind): ours(kind) for kind in ("Service", "PodDisruptionBudget", "PersistentVolumeClaim")}
    decision = decided(facts(document()), live, catalogue)
    assert decision.unwanted == (Child("PodDisruptionBudget"),)  # but not the claim, which contains data
    assert decided(facts(document(surprise=1)), live, catalogue).unwanted == ()


SERVED = Route(
    "Routed", "the gateway serves the endpoint", GatewaySettings("https://models.example.com", "system", "gateway")
)


def test_routed_endpoint_reports_the_gateways_address(document: Any, catalogue: Catalogue) -> None:
    reported = report(document(), catalogue, route=SERVED)
    assert condition(reported, "Routed") == ("True", "Routed")
    gateway = {"name": "gateway", "url": "https://models.example.com/v1"}
    assert reported["addresses"] == [{"name": "cluster", "url": reported["url"]}, gateway]
    assert reported["url"] == "http://demo.default.svc:8000/v1"
    refused = report(document(model={"source": "nonsense"}), catalogue, route=SERVED)
    assert refused["addresses"] == [gateway], "running pods stay routed"


def test_unrouted_endpoint_reports_the_reason(document: Any, catalogue: Catalogue) -> None:
    taken = report(document(), catalogue, route=Route("NameTaken", "the name a belongs to an older endpoint"))
    assert condition(taken, "Routed") == ("False", "NameTaken")
    assert [each["name"] for each in taken["addresses"]] == ["cluster"]
    foreign = {Child("Service"): {"kind": "Service", "metadata": {"name": "demo"}}}
    stolen = report(document(), catalogue, route=SERVED, live=foreign)
    assert condition(stolen, "Routed") == ("False", "NoService")
    assert "addresses" not in stolen


def test_addresses_are_limited_to_the_schemas_maximum(document: Any, catalogue: Catalogue) -> None:
    service = {**ours("Service"), "status": {"loadBalancer": {"ingress": [{"ip": f"10.0.0.{n}"} for n in range(40)]}}}
    manifest = document(service={"type": "LoadBalancer"}, networkPolicy={"mode": "Open"})
    reported = report(manifest, catalogue, route=SERVED, live={Child("Service"): service})
    assert len(reported["addresses"]) == 16
    assert reported["addresses"][-1]["name"] == "gateway"
