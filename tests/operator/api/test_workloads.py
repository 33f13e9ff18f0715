"""Endpoints with more than one workload: each workload has its own objects, by kind and workload."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from stoker_operator.api.v1alpha1 import Spec
from stoker_operator.cluster import observe
from stoker_operator.cluster.store import Store
from stoker_operator.objects.facts import MAIN, Child, Endpoint, Key, Reported, Rollout
from stoker_operator.objects.owner import INSTANCE, Owner
from stoker_operator.plan.catalogue import Catalogue
from stoker_operator.reconcile.decide import Decision, decide
from stoker_operator.reconcile.diagnosis import Diagnosis
from stoker_operator.reconcile.evaluate import PlanningContext, evaluate
from stoker_operator.reconcile.observed import Observed, ObservedWorkload
from stoker_operator.reconcile.status import status
from stoker_operator.workloads.composition import Composition, Role, Workload

OWNER = Owner("demo", "default", "uid-1")
PREFILL = OWNER.of("prefill")
DONE = Rollout(current=True, desired=1, total=1, updated=1, ready=1, available=1)
HALF = Rollout(current=True, desired=2, total=2, updated=1, ready=1, available=1)


@pytest.fixture
def store() -> Store:
    return Store("stoker", INSTANCE)


def seen(owner: Owner, kind: str, version: int, **metadata: Any) -> dict[str, Any]:
    """Return an object of the endpoint, as the API server returns it."""
    return {"kind": kind, "metadata": {**owner.metadata(), "resourceVersion": str(version), **metadata}}


def decided(document: Any, live: Any, *also: Owner) -> Decision:
    """Return the decision on an endpoint with additional workloads."""

    def workloads(spec: Spec) -> tuple[Workload, ...]:
        further = (Workload(owner.workload, spec, role=Role.SUPPORTING) for owner in also)
        return (Workload(MAIN, spec), *further)

    composition = Composition(workloads=workloads)
    evaluation = evaluate(OWNER, document, PlanningContext(Catalogue.load(), composition=composition))
    return decide(facts(document), OWNER, evaluation, live, {}, "stoker", composition)


def facts(document: Any) -> Endpoint:
    return Endpoint(Key("default", "demo"), "uid-1", 7, False, document, {})


def test_objects_are_named_after_their_workload() -> None:
    assert OWNER.metadata()["name"] == "demo"
    assert PREFILL.metadata()["name"] == "demo-prefill"
    assert PREFILL.metadata()["ownerReferences"] == OWNER.metadata()["ownerReferences"]
    assert PREFILL.selector() != OWNER.selector()


def test_objects_of_each_workload_are_found(store: Store) -> None:
    for version, owner in enumerate((OWNER, PREFILL), 1):
        store.put(seen(owner, "Deployment", version))
    # Copied labels do not make an object the operator's: objects are known by name.
    store.put(seen(OWNER, "Service", 3, name="copied"))
    found = observe.children(store, OWNER, {Child("Service")})
    assert set(found) == {Child("Deployment"), Child("Deployment", "prefill")}
    assert found[Child("Deployment", "prefill")]["metadata"]["name"] == "demo-prefill"


def test_pods_are_distinguished_by_workload(store: Store) -> None:
    for version, owner in enumerate((OWNER, PREFILL), 1):
        pod = seen(owner, "Pod", version, name=f"{owner.object_name}-x", creationTimestamp="2026-01-01T12:00:00Z")
        store.put(pod | {"spec": {"containers": []}, "status": {}})
    assert [pod.name for pod in observe.pods(store, Key("default", "demo"), "prefill")] == ["demo-prefill-x"]


def test_each_workload_is_pinned_by_itself(document: Any) -> None:
    first = decided(document(), {}, PREFILL)
    assert set(first.pinned) == {MAIN, "prefill"}
    live = {Child.of(each): each for each in first.objects}
    assert len(live) == len(first.objects)
    second_decision = decided(document(), live, PREFILL)
    assert second_decision.objects == first.objects and not second_decision.unwanted


def test_removed_workload_is_deleted_except_for_its_claim(document: Any) -> None:
    live = {
        Child(kind, "prefill"): seen(PREFILL, kind, 1) for kind in ("Deployment", "Service", "PersistentVolumeClaim")
    }
    live[Child("ServiceAccount", "decode")] = seen(OWNER.of("decode"), "ServiceAccount", 1, ownerReferences=[])
    decision = decided(document(), live)
    assert decision.objects and not decision.conflict
    assert set(decision.unwanted) == {Child("Deployment", "prefill"), Child("Service", "prefill")}


def test_ready_requires_every_workload(document: Any) -> None:
    decision = decided(document(), {}, PREFILL)
    trouble = Diagnosis("Unschedulable", "no node has room for pod demo-prefill-x")
    workloads = {
        MAIN: ObservedWorkload(DONE, reported=Reported(7)),
        "prefill": ObservedWorkload(HALF, trouble, reported=Reported(8)),
    }
    reported = status(facts(document()), decision, Observed({}, "", workloads), datetime(2026, 1, 1, tzinfo=UTC))
    conditions = {each["type"]: (each["status"], each["reason"]) for each in reported["conditions"]}
    assert conditions["Ready"] == ("False", "Unschedulable")
    assert conditions["Available"][0] == "True"
    assert reported["replicas"] == 1  # the scale subresource is the main workload's
    assert [(each["name"], each["engine"]["kvBlocks"]) for each in reported["workloads"]] == [
        ("main", 7),
        ("prefill", 8),
    ]
