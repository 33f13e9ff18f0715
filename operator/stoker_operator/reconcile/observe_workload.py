"""Observes one workload: the progress of its rollout, why pods are not ready, and what its engines report."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from stoker_operator.cluster import observe
from stoker_operator.cluster.engine_facts import metrics_url
from stoker_operator.objects.facts import Endpoint, Key, Object, OlderObject, Pod, Reported, Rollout
from stoker_operator.plan.capacity import capacity
from stoker_operator.reconcile.cluster import Cluster
from stoker_operator.reconcile.decide import Decision
from stoker_operator.reconcile.diagnosis import Diagnosis, diagnose
from stoker_operator.reconcile.observed import ObservedWorkload
from stoker_operator.reconcile.pinning import Pinned, engine, image
from stoker_operator.reconcile.referenced_objects import older, references
from stoker_operator.reconcile.workload_status import reported_args, reported_workload
from stoker_operator.workloads.kind import WorkloadKind

#: Flags that start several engine processes; used for pods of earlier releases, which have no recorded plan.
_MULTI_PROCESS_FLAGS: Final = ("--tensor-parallel-size=", "--pipeline-parallel-size=", "--data-parallel-size=")


def observe_workload(
    cluster: Cluster,
    decision: Decision,
    endpoint: Endpoint,
    name: str,
    kind: WorkloadKind,
    objects: Sequence[Object],
    now: datetime,
) -> ObservedWorkload:
    """Return the observed state of a workload whose pods are run by `objects`."""
    rollout = kind.rollout(objects)
    pods = observe.pods(cluster.store, endpoint.key, name, kind, objects)
    # Until the workload's controller has observed the newest spec, that spec may fix the pods' problems.
    troubled = rollout.current and not rollout.complete
    trouble = _trouble(cluster, decision, endpoint.key, name, rollout, pods, now) if troubled else None
    serving = tuple(pod for pod in pods if pod.takes_requests)
    reported = _reported(cluster, decision, endpoint, name, serving, moving=not rollout.complete)
    silent = reported is None and any(pod.ready for pod in serving)
    engines = cluster.engines(endpoint.key, name, _with_ranks(decision, name, serving))
    older_found = _older(cluster, decision, endpoint, name, rollout, pods)
    named = tuple(f"{kind.name.lower()}/{each['metadata']['name']}" for each in objects)
    return ObservedWorkload(rollout, trouble, reported, silent, engines, older_found, named)


def _older(
    cluster: Cluster, decision: Decision, endpoint: Endpoint, workload: str, rollout: Rollout, pods: tuple[Pod, ...]
) -> tuple[OlderObject, ...]:
    """Return the referenced objects that changed after pods read them; none during a rollout, which replaces pods."""
    spec = next((each.spec for each in decision.evaluation.workloads if each.name == workload), None)
    if spec is None or not decision.objects or not rollout.complete:
        return ()
    return older(references(spec), lambda each: cluster.version(endpoint.key.namespace, each), pods)


def _with_ranks(decision: Decision, workload: str, pods: tuple[Pod, ...]) -> dict[str, str]:
    """Return the metrics URLs of pods in which several processes of Stoker's engine compute, by pod name."""
    if workload not in decision.pinned:
        return {}
    container = engine(decision.pinned[workload].template)
    # Only containers of other runtimes, such as vLLM, have a command.
    if "command" in container or not _has_several_processes(decision.pinned[workload]):
        return {}
    return {pod.name: metrics_url(container, pod.address) for pod in pods if pod.address and not pod.failed[0]}


def _has_several_processes(pinned: Pinned) -> bool:
    """Return whether several processes compute in each of the pinned pods."""
    if pinned.plan:
        return pinned.plan["tensor"] * pinned.plan["pipeline"] * pinned.plan["data"] > 1
    return any(word.startswith(_MULTI_PROCESS_FLAGS) for word in engine(pinned.template).get("args", ()))


def _trouble(
    cluster: Cluster,
    decision: Decision,
    key: Key,
    workload: str,
    rollout: Rollout,
    pods: tuple[Pod, ...],
    now: datetime,
) -> Diagnosis | None:
    pods = tuple(observe.with_mount_failure(cluster.kube, key, pod, now) for pod in pods)
    room = ""
    nodes = observe.nodes(cluster.store)
    plan = decision.evaluation.plans.get(workload)
    if plan and nodes and any(pod.unscheduled[0] == "Unschedulable" for pod in pods):
        placement = plan.placement
        # If even empty nodes lack room, the pods that occupy accelerators need not be listed.
        room = capacity(nodes, (), placement.accelerator, placement.count)
        room = room or capacity(nodes, cluster.holders(), placement.accelerator, placement.count)
    return diagnose(pods, rollout, room)


def _reported(
    cluster: Cluster, decision: Decision, endpoint: Endpoint, workload: str, pods: tuple[Pod, ...], *, moving: bool
) -> Reported | None:
    """Return the facts that the engine has reported, or None.

    After a change of image or command line, the engine of a ready pod is queried once the rollout is complete, until it
    answers.
    """
    if workload not in decision.pinned:
        return None
    template = decision.pinned[workload].template
    container = engine(template)
    earlier = reported_workload(endpoint, workload) or {}
    before = earlier.get("engine") or {}
    known = None
    if (earlier.get("image"), before.get("args")) == (
        image(template),
        reported_args(container),
    ) and "kvBlocks" in before:
        known = Reported(int(before["kvBlocks"]), before.get("kvCacheDtype", ""), before.get("weights", ""))
        # An earlier release of the operator may have reported blocks without weights.
        if known.weights or earlier.get("runtime") != "stoker":
            return known
    pod = next((pod for pod in pods if pod.ready and pod.address), None)
    if moving or pod is None:
        return known
    return cluster.reported(endpoint.key, workload, pod.name, metrics_url(container, pod.address)) or known
