"""Converts the cluster's objects into immutable facts.

Most facts are read from the store and cost no request. Objects that are rarely needed are requested instead of watched:
objects without the operator's label, a claim that a spec names, and a node's events about a volume.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from stoker_operator.api.v1alpha1 import KIND
from stoker_operator.api.v1alpha1.template import ENGINE_CONTAINER
from stoker_operator.cluster.kube import Kube
from stoker_operator.cluster.store import Store
from stoker_operator.objects.facts import (
    MAIN,
    WORKLOAD,
    Child,
    Container,
    Endpoint,
    Key,
    Node,
    Object,
    Pod,
)
from stoker_operator.objects.owner import Owner
from stoker_operator.workloads.composition import ONE_DEPLOYMENT
from stoker_operator.workloads.deployment import DEPLOYMENT
from stoker_operator.workloads.kind import WorkloadKind

#: Kinds of object that each workload of an endpoint may have, besides the one that runs its pods.
_NEEDED_KINDS: Final = ("ServiceAccount", "PersistentVolumeClaim", "Service", "NetworkPolicy", "PodDisruptionBudget")
_MONITOR_KINDS: Final = ("PodMonitor",)
#: Age in seconds from which the events of a pod whose containers are still being created are read for the cause.
_CREATING_SECONDS: Final = 5


def endpoint(store: Store, key: Key) -> Endpoint | None:
    """Return the stored endpoint, or None if it does not exist."""
    document = store.get(KIND, *key)
    return _endpoint(key, document) if document else None


def fetch_endpoint(kube: Kube, key: Key) -> Endpoint | None:
    """Read the endpoint from the API server, since the stored one may be outdated. Return None if it does not exist.

    Raises:
        KubeError: the request failed.
    """
    found = kube.list(KIND, key.namespace, fields=f"metadata.name={key.name}").items
    return _endpoint(key, found[0]) if found else None


def _endpoint(key: Key, document: Object) -> Endpoint:
    metadata = document["metadata"]
    return Endpoint(
        key=key,
        uid=metadata["uid"],
        generation=metadata["generation"],
        deleting="deletionTimestamp" in metadata,
        document=document,
        status=document.get("status") or {},
    )


def children(
    store: Store, owner: Owner, desired: Iterable[Child], kinds: Sequence[WorkloadKind] = ONE_DEPLOYMENT.kinds
) -> dict[Child, Object]:
    """Return the stored objects with the names of the endpoint's objects. Their owner is not checked.

    Args:
        store: the watched objects.
        owner: the endpoint.
        desired: the objects that should exist. The objects of their workloads are returned, and those of all other
            workloads that the labels of the endpoint's stored objects name.
        kinds: the kinds of object that run pods.
    """
    key, desired = Key(owner.namespace or "", owner.name), set(desired)
    names = (*_NEEDED_KINDS, *(kind.name for kind in kinds), *_MONITOR_KINDS)
    labelled = (each for name in names for each in store.of_endpoint(name, key))
    workloads = {MAIN, *(each.workload for each in desired), *map(_workload, labelled)}
    components = {each for each in desired if each.component}
    for kind in kinds:
        named = _components(store, key, kind)
        components |= {child for child, live in named if kind.selects(owner.of(child.workload, child.component), live)}
    known = (*(Child(name, workload) for workload in sorted(workloads) for name in names), *sorted(components))
    found = {child: store.get(child.kind, key.namespace, owner.name_of(child)) for child in known}
    return {child: live for child, live in found.items() if live is not None}


def _components(store: Store, key: Key, kind: WorkloadKind) -> list[tuple[Child, Object]]:
    """Return the endpoint's objects of this kind whose names end in a component."""
    labelled = ((Child.of(each), each) for each in store.of_endpoint(kind.name, key))
    return [(child, live) for child, live in labelled if child.component]


def unlabelled(kube: Kube, owner: Owner, missing: Iterable[Child]) -> dict[Child, Object]:
    """Request the objects that the store lacks, and return those that exist.

    Most likely they have another owner, and are not watched because they lack the operator's label.

    Raises:
        KubeError: the request failed.
    """
    found = {each: kube.get(each.kind, owner.namespace or "", owner.name_of(each)) for each in missing}
    return {child: live for child, live in found.items() if live is not None}


def pods(
    store: Store, key: Key, workload: str, kind: WorkloadKind = DEPLOYMENT, objects: Sequence[Object] = ()
) -> tuple[Pod, ...]:
    """Return the pods of a workload that are not being deleted, newest first.

    Args:
        store: the watched objects.
        key: the endpoint.
        workload: name of the workload.
        kind: the kind of object that runs the pods.
        objects: the workload's objects of that kind.
    """
    live = [
        each
        for each in store.of_endpoint("Pod", key)
        if "deletionTimestamp" not in each["metadata"] and _workload(each) == workload
    ]
    asked = kind.request_pods(Owner(key.name, key.namespace).of(workload)).items()
    seen = (
        pod(each, kind.pod_version(each, objects), takes_requests=asked <= each["metadata"]["labels"].items())
        for each in live
    )
    return tuple(sorted(seen, key=lambda each: (each.created, each.name), reverse=True))


def with_mount_failure(kube: Kube, key: Key, seen: Pod, now: datetime) -> Pod:
    """Return the pod with its node's newest message about a volume, if its containers are still being created after
    `_CREATING_SECONDS`.

    Raises:
        KubeError: the request failed.
    """
    age = (now - datetime.fromisoformat(seen.created)).total_seconds()
    if not seen.node or not seen.starting or age < _CREATING_SECONDS:
        return seen
    selector = f"involvedObject.kind=Pod,involvedObject.name={seen.name},type=Warning"
    events = kube.list("Event", key.namespace, fields=selector).items
    volume = [each for each in events if each.get("reason") in ("FailedMount", "FailedAttachVolume", "FailedMapVolume")]
    newest: Any = max(volume, key=lambda each: each.get("lastTimestamp") or "", default={})
    return dataclasses.replace(seen, mount_failure=newest.get("message", ""))


def nodes(store: Store) -> tuple[Node, ...]:
    """Return the cluster's nodes; none if the operator may not read them."""
    return tuple(map(node, store.all("Node")))


def pod(live: Object, version: str = "", *, takes_requests: bool = True) -> Pod:
    """Return the facts of one pod.

    Args:
        live: the pod.
        version: version of its workload's pod template, as `WorkloadKind.pod_version` returns it.
        takes_requests: whether it answers the workload's requests.
    """
    status: Any = live.get("status") or {}
    conditions = {each["type"]: each for each in status.get("conditions") or ()}
    scheduled, ready = conditions.get("PodScheduled", {}), conditions.get("Ready", {})
    named = ("initContainerStatuses", "containerStatuses")
    statuses = [each for name in named for each in status.get(name) or ()]
    return Pod(
        name=live["metadata"]["name"],
        created=live["metadata"]["creationTimestamp"],
        ready=ready.get("status") == "True",
        version=version,
        takes_requests=takes_requests,
        node=live["spec"].get("nodeName") or "",
        address=status.get("podIP", ""),
        requests=_requests(live),
        unscheduled=_reason_and_message(scheduled) if scheduled.get("status") == "False" else ("", ""),
        containers=tuple(map(_container, statuses)),
        failed=_failure(status),
        unready=_unready(ready, conditions.get("ContainersReady", {}), statuses),
    )


def _failure(status: Object) -> tuple[str, str]:
    """Return reason and message of a pod that has failed or is lost, or empty texts."""
    phase = status.get("phase")
    return (
        (status.get("reason") or f"Pod{phase}", status.get("message", ""))
        if phase in ("Failed", "Unknown")
        else ("", "")
    )


def _unready(ready: Object, containers: Object, statuses: Sequence[Object]) -> tuple[str, str]:
    """Return why a pod is not ready although its containers are ready, or its running engine was ready before;
    otherwise empty texts."""
    if ready.get("status") not in ("False", "Unknown"):
        return ("", "")
    if containers.get("status") == "True":  # a readiness gate is closed, or the node no longer reports
        return _reason_and_message(ready)
    engine: Any = next((each for each in statuses if each["name"] == ENGINE_CONTAINER), {})
    since = ((engine.get("state") or {}).get("running") or {}).get("startedAt")
    turned = ready.get("lastTransitionTime")
    if not since or not turned:
        return ("", "")
    # A pod that was never ready has been unready since before its engine started.
    served = datetime.fromisoformat(str(turned)) > datetime.fromisoformat(str(since))
    return _reason_and_message(ready) if served else ("", "")


def _reason_and_message(condition: Object) -> tuple[str, str]:
    return condition.get("reason") or f"{condition['type']}{condition['status']}", condition.get("message", "")


def node(live: Object) -> Node:
    """Return the facts of one node."""
    status: Any = live.get("status") or {}
    conditions = {each["type"]: each["status"] for each in status.get("conditions") or ()}
    return Node(
        name=live["metadata"]["name"],
        labels=live["metadata"].get("labels") or {},
        allocatable=countable(status.get("allocatable") or {}),
        ready=conditions.get("Ready") == "True",
        unschedulable=bool(live["spec"].get("unschedulable")),
    )


def access_modes(kube: Kube, namespace: str, claim: str) -> tuple[str, ...] | None:
    """Return the access modes of a claim, or None if it does not exist.

    Raises:
        KubeError: the request failed.
    """
    live = kube.get("PersistentVolumeClaim", namespace, claim)
    return tuple(live["spec"].get("accessModes", ())) if live else None


def _workload(live: Object) -> str:
    return str((live["metadata"].get("labels") or {}).get(WORKLOAD, MAIN))


def _container(seen: Object) -> Container:
    state, last = seen.get("state") or {}, seen.get("lastState") or {}
    waiting = state.get("waiting") or {}
    end = state.get("terminated") or last.get("terminated") or {}
    return Container(
        name=seen["name"],
        ready=bool(seen.get("ready")),
        running="running" in state,
        started=(state.get("running") or {}).get("startedAt") or "",
        waiting=(waiting.get("reason", ""), waiting.get("message", "")),
        exit_code=end.get("exitCode"),
        exit_reason=end.get("reason", ""),
        last_words=end.get("message", ""),
    )


def _requests(live: Object) -> dict[str, int]:
    total: dict[str, int] = {}
    for container in live["spec"]["containers"]:
        resources = container.get("resources") or {}
        for name, amount in countable({**resources.get("limits", {}), **resources.get("requests", {})}).items():
            total[name] = total.get(name, 0) + amount
    return total


def countable(amounts: Mapping[str, Any]) -> dict[str, int]:
    """Return the amounts of devices: extended resources, whose names have a domain and whose amounts are integers."""
    return {name: int(amount) for name, amount in amounts.items() if "/" in name and str(amount).isdigit()}
