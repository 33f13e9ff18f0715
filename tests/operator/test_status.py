"""Facts and decision in, conditions out."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from stoker_operator.decide import Decision, decide
from stoker_operator.diagnosis import diagnose
from stoker_operator.facts import Endpoint, Key, Pod, Rollout
from stoker_operator.observe import pod as observe_pod
from stoker_operator.observe import rollout as observe_rollout
from stoker_operator.plan.catalogue import Catalogue
from stoker_operator.status import status

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
LATER = datetime(2026, 1, 1, 13, tzinfo=UTC)
DONE = Rollout(current=True, desired=2, total=2, updated=2, ready=2, available=2)
HALF = Rollout(current=True, desired=2, total=3, updated=1, ready=2, available=2)
SERVING = Pod("p1", "2026", ready=True)


def facts(document: Any, **before: Any) -> Endpoint:
    return Endpoint(Key("default", "demo"), "uid-1", 7, False, document, before)


def ours(kind: str) -> dict[str, Any]:
    reference = {"uid": "uid-1", "controller": True, "kind": "InferenceEndpoint", "name": "demo"}
    return {"kind": kind, "metadata": {"ownerReferences": [reference]}}


def report(
    document: Any,
    catalogue: Catalogue,
    rollout: Rollout | None = DONE,
    *pods: Pod,
    refusal: str = "",
    live: Any = None,
    before: Any = None,
    now: datetime = NOON,
) -> dict[str, Any]:
    endpoint = facts(document, **(before or {}))
    live = {"Service": ours("Service")} if live is None else live
    return status(endpoint, decide(endpoint, live, catalogue), refusal, live, rollout, pods, now)


def condition(reported: dict[str, Any], kind: str) -> tuple[str, str]:
    found = next(each for each in reported["conditions"] if each["type"] == kind)
    assert found["observedGeneration"] == 7
    assert found["message"]
    return found["status"], found["reason"]


def test_an_endpoint_that_serves(document: Any, catalogue: Catalogue) -> None:
    reported = report(document(replicas=2), catalogue)
    assert {
        kind: condition(reported, kind) for kind in ("Accepted", "Planned", "Available", "Progressing", "Ready")
    } == {
        "Accepted": ("True", "Accepted"),
        "Planned": ("True", "Planned"),
        "Available": ("True", "Available"),
        "Progressing": ("False", "RolledOut"),
        "Ready": ("True", "Ready"),
    }
    assert reported["url"] == "http://demo.default.svc:8000/v1"
    assert reported["observedGeneration"] == 7
    assert reported["workloads"] == [
        {"name": "main", "image": "stoker/engine-cpu:0.1.0", "plan": {"tensor": 1, "data": 1}}
    ]
    assert reported["selector"].startswith("app.kubernetes.io/name=stoker-engine,app.kubernetes.io/instance=demo")


def test_an_endpoint_that_rolls_is_available_and_not_ready(document: Any, catalogue: Catalogue) -> None:
    reported = report(document(), catalogue, HALF, SERVING)
    assert condition(reported, "Available") == ("True", "Available")
    assert condition(reported, "Progressing") == ("True", "RollingOut")
    assert condition(reported, "Ready") == ("False", "RollingOut")


def test_a_deployment_that_was_just_changed_is_not_complete() -> None:
    numbers = {"replicas": 1, "updatedReplicas": 1, "readyReplicas": 1, "availableReplicas": 1}
    deployment = {
        "metadata": {"generation": 2},
        "spec": {"replicas": 1},
        "status": {**numbers, "observedGeneration": 1},
    }
    assert not observe_rollout(deployment).complete


def test_no_replicas_are_ready(document: Any, catalogue: Catalogue) -> None:
    none = Rollout(current=True, desired=0, total=0, updated=0, ready=0, available=0)
    reported = report(document(replicas=0), catalogue, none)
    assert condition(reported, "Ready") == ("True", "ScaledToZero")
    assert condition(reported, "Available") == ("False", "NoPodServes")


def test_a_spec_that_is_refused_leaves_what_runs(document: Any, catalogue: Catalogue) -> None:
    before = {"workloads": [{"name": "main", "image": "old", "plan": {"tensor": 1, "data": 1}}]}
    wrong = document(hardware={"accelerator": "no-such"})
    reported = report(wrong, catalogue, before=before)
    assert condition(reported, "Accepted") == ("False", "UnknownAccelerator")
    assert condition(reported, "Planned") == ("Unknown", "NotAccepted")
    assert condition(reported, "Available") == ("True", "Available")
    assert condition(reported, "Progressing") == ("False", "UnknownAccelerator")
    assert condition(reported, "Ready") == ("False", "UnknownAccelerator")
    assert reported["workloads"] == before["workloads"]
    assert decide(facts(wrong), {}, catalogue).objects == ()


def test_a_spec_of_another_version_is_refused_and_no_bug(document: Any, catalogue: Catalogue) -> None:
    reported = report(document(surprise=1), catalogue)
    assert condition(reported, "Ready") == ("False", "Invalid")


def test_what_the_api_server_refuses_is_told(document: Any, catalogue: Catalogue) -> None:
    reported = report(document(), catalogue, None, refusal="Deployment: quota exceeded")
    assert condition(reported, "Ready") == ("False", "ApplyFailed")
    assert "quota exceeded" in reported["conditions"][-1]["message"]


@pytest.mark.parametrize(
    ("references", "words"),
    [
        ([], "was made by someone else and is left alone; delete it"),
        ([{"uid": "u", "kind": "App", "name": "x", "controller": True}], "belongs to App x and is left alone"),
        (
            [{"uid": "uid-0", "kind": "InferenceEndpoint", "name": "demo", "controller": True}],
            "belongs to an earlier endpoint of this name; it is being deleted",
        ),
    ],
)
def test_an_object_of_another_owner_is_left_alone(
    document: Any, catalogue: Catalogue, references: Any, words: str
) -> None:
    live = {"Service": {"kind": "Service", "metadata": {"ownerReferences": references}}}
    assert decide(facts(document()), live, catalogue).objects == ()
    reported = report(document(), catalogue, None, live=live)
    assert condition(reported, "Ready") == ("False", "NameConflict")
    assert words in reported["conditions"][-1]["message"]
    assert "url" not in reported


def test_a_condition_keeps_the_time_of_its_last_change(document: Any, catalogue: Catalogue) -> None:
    first = report(document(), catalogue, HALF)
    second = report(document(), catalogue, DONE, before=first, now=LATER)
    times = {each["type"]: each["lastTransitionTime"] for each in second["conditions"]}
    assert times["Ready"] == "2026-01-01T13:00:00Z"
    assert times["Available"] == "2026-01-01T12:00:00Z"
    assert report(document(), catalogue, DONE, before=second, now=datetime(2027, 1, 1, tzinfo=UTC)) == second


@pytest.mark.parametrize(
    ("pod", "reason", "words"),
    [
        (Pod("p", "", False, unschedulable="0/2 nodes."), "Unschedulable", "no node takes pod p: 0/2 nodes. Free or"),
        (Pod("p", "", False, waiting=("ErrImagePull", "not found")), "ImagePullError", "not found; check spec.engine"),
        (Pod("p", "", False, waiting=("CreateContainerConfigError", "no key")), "StartError", "no key"),
        (Pod("p", "", False, exit_code=1, last_words="no such model\n"), "CrashLoopBackOff", "code 1: no such model"),
        (Pod("p", "", False, exit_code=1), "CrashLoopBackOff", "it said nothing; see the pod's log"),
        (Pod("p", "", False, exit_code=137, exit_reason="OOMKilled"), "OOMKilled", "limits.memory"),
        (Pod("p", "", False, exit_code=137, exit_reason="Error"), "OOMKilled", "limits.memory"),
    ],
)
def test_trouble_has_a_name_and_a_remedy(
    document: Any, catalogue: Catalogue, pod: Pod, reason: str, words: str
) -> None:
    reported = report(document(), catalogue, HALF, SERVING, pod)
    assert condition(reported, "Ready") == ("False", reason)
    assert words in reported["conditions"][-1]["message"]


def test_a_pod_that_only_starts_is_no_trouble() -> None:
    assert diagnose([Pod("p", "", False), Pod("q", "", True, exit_code=1)]) is None


def test_a_pod_is_read_from_what_the_kubelet_says() -> None:
    live = {
        "metadata": {"name": "p", "creationTimestamp": "2026-01-01T00:00:00Z"},
        "status": {
            "conditions": [
                {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes"},
                {"type": "Ready", "status": "False"},
            ],
            "containerStatuses": [
                {
                    "name": "engine",
                    "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}},
                    "lastState": {"terminated": {"exitCode": 1, "reason": "Error", "message": "bye"}},
                }
            ],
        },
    }
    assert observe_pod(live) == Pod(
        "p", "2026-01-01T00:00:00Z", False, "0/1 nodes", ("CrashLoopBackOff", "back-off"), 1, "Error", "bye"
    )
    assert observe_pod({"metadata": live["metadata"]}) == Pod("p", "2026-01-01T00:00:00Z", False)


def test_a_decision_ties_everything_to_the_endpoint(document: Any, catalogue: Catalogue) -> None:
    decision: Decision = decide(facts(document()), {}, catalogue)
    assert [each["kind"] for each in decision.objects] == ["ServiceAccount", "Service", "Deployment"]
    for each in decision.objects:
        (reference,) = each["metadata"]["ownerReferences"]
        assert (reference["uid"], reference["controller"], reference["blockOwnerDeletion"]) == ("uid-1", True, True)
        assert each["metadata"]["namespace"] == "default"
