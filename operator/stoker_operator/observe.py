"""The cluster → frozen facts. Reads and interprets, and judges nothing."""

from __future__ import annotations

from typing import Any

from stoker_operator.api.v1alpha1 import KIND
from stoker_operator.facts import Endpoint, Key, Object, Pod, Rollout
from stoker_operator.kube import Kube

#: The kinds of object an endpoint has; each has the endpoint's name.
CHILD_KINDS = ("ServiceAccount", "Service", "Deployment")


def endpoint(kube: Kube, key: Key) -> Endpoint | None:
    """The endpoint, or None when it is gone."""
    document = kube.get(KIND, *key)
    if document is None:
        return None
    metadata = document["metadata"]
    return Endpoint(
        key=key,
        uid=metadata["uid"],
        generation=metadata["generation"],
        deleting="deletionTimestamp" in metadata,
        document=document,
        status=document.get("status") or {},
    )


def children(kube: Kube, key: Key) -> dict[str, Object]:
    """The objects of the endpoint's name that there are, by kind; whose they are is not asked here."""
    found = {kind: kube.get(kind, *key) for kind in CHILD_KINDS}
    return {kind: live for kind, live in found.items() if live is not None}


def pods(kube: Kube, key: Key, labels: dict[str, str]) -> tuple[Pod, ...]:
    """The endpoint's pods that are there to stay, the newest first."""
    live = kube.list("Pod", key.namespace, labels)
    found = [pod(each) for each in live if "deletionTimestamp" not in each["metadata"]]
    return tuple(sorted(found, key=lambda each: each.created, reverse=True))


def rollout(deployment: Object) -> Rollout:
    """How far a Deployment has got."""
    status: Any = deployment.get("status") or {}
    conditions = {each["type"]: each for each in status.get("conditions", ())}
    failure = conditions.get("ReplicaFailure", {})
    return Rollout(
        current=status.get("observedGeneration", 0) >= deployment["metadata"]["generation"],
        desired=deployment["spec"]["replicas"],
        total=status.get("replicas", 0),
        updated=status.get("updatedReplicas", 0),
        ready=status.get("readyReplicas", 0),
        available=status.get("availableReplicas", 0),
        failure=failure.get("message", "") if failure.get("status") == "True" else "",
    )


def pod(live: Object) -> Pod:
    """One pod."""
    status: Any = live.get("status") or {}
    conditions = {each["type"]: each for each in status.get("conditions", ())}
    scheduled = conditions.get("PodScheduled", {})
    container: Any = next((each for each in status.get("containerStatuses", ()) if each["name"] == "engine"), {})
    state, last = container.get("state") or {}, container.get("lastState") or {}
    waiting = state.get("waiting") or {}
    end = state.get("terminated") or last.get("terminated") or {}
    return Pod(
        name=live["metadata"]["name"],
        created=live["metadata"]["creationTimestamp"],
        ready=conditions.get("Ready", {}).get("status") == "True",
        unschedulable=scheduled.get("message", "") if scheduled.get("reason") == "Unschedulable" else "",
        waiting=(waiting.get("reason", ""), waiting.get("message", "")),
        exit_code=end.get("exitCode"),
        exit_reason=end.get("reason", ""),
        last_words=end.get("message", ""),
    )
