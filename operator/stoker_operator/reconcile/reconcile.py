"""One endpoint, made so: the whole flow on one screen.

Level-based: it looks at what is, not at what happened, so that it may be called at any time and any number of
times, after lost events and after a restart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Any, Final

from stoker_operator.api.violation import Violation
from stoker_operator.cluster import observe
from stoker_operator.cluster.engine_facts import metrics_url
from stoker_operator.cluster.kube import Kube
from stoker_operator.cluster.store import Store
from stoker_operator.manifests.storage import named_claims
from stoker_operator.objects.facts import (
    Child,
    Endpoint,
    EngineStates,
    Key,
    OlderObject,
    Pod,
    Reported,
    Rollout,
)
from stoker_operator.objects.owner import Owner
from stoker_operator.plan.capacity import Holder, capacity
from stoker_operator.reconcile.apply import MANAGER, Writer
from stoker_operator.reconcile.conditions import older_objects
from stoker_operator.reconcile.decide import Decision, decide, is_held, is_ours, refuse
from stoker_operator.reconcile.diagnosis import Diagnosis, diagnose
from stoker_operator.reconcile.evaluate import Evaluation, PlanningContext, evaluate
from stoker_operator.reconcile.observed import Observed, ObservedWorkload
from stoker_operator.reconcile.other_operators import OtherOperators
from stoker_operator.reconcile.pinning import engine, image, is_behind
from stoker_operator.reconcile.referenced_objects import Reference, Version, older, references
from stoker_operator.reconcile.status import failed, status
from stoker_operator.reconcile.workload_status import reported_args, reported_workload

#: How long requests go to the engine of an endpoint that has become ready, while it has not reported its blocks.
_ASK_FOR: Final = timedelta(minutes=2)


class Outcome(Enum):
    """What a reconcile found.

    GONE: there is no such endpoint. CHANGED: its spec has changed meanwhile. SETTLED: everything is as wanted. MOVING:
    pods are not there yet, or something is in the way that may pass. HELD: pods are not made before something that is
    known in a moment. REFUSED: the API server takes something else than what is wanted. YIELDED: another operator
    serves it.
    """

    GONE = "gone"
    CHANGED = "changed"
    SETTLED = "settled"
    MOVING = "moving"
    HELD = "held"
    REFUSED = "refused"
    YIELDED = "yielded"


#: Flags of engines that are several processes; other engines than ours have a command beside them.
_MULTI_PROCESS_FLAGS: Final = ("--tensor-parallel-size=", "--pipeline-parallel-size=", "--data-parallel-size=")


@dataclass(frozen=True)
class Cluster:
    """What a reconcile works with.

    Attributes:
        kube: the cluster.
        store: what has been seen.
        writer: who writes.
        holders: who holds accelerators; listed on call.
        reported: what an engine reports, where it did; by endpoint, workload, pod and the URL of its metrics.
        engines: which engines serve, by pod, where several processes compute; by endpoint, workload, and the URLs of
            the pods' metrics.
        operators: this operator's name, and which others serve endpoints; None: no operator has a name.
        version: when a Secret or ConfigMap got its data, by its namespace; None where nothing is known of it.
    """

    kube: Kube
    store: Store
    writer: Writer
    holders: Callable[[], Sequence[Holder]] = tuple
    reported: Callable[[Key, str, str, str], Reported | None] = lambda _key, _workload, _pod, _url: None
    engines: Callable[[Key, str, Mapping[str, str]], Mapping[str, EngineStates]] = lambda _key, _workload, _urls: {}
    operators: OtherOperators | None = None
    version: Callable[[str, Reference], Version | None] = lambda _namespace, _reference: None


def reconcile(cluster: Cluster, context: PlanningContext, key: Key, now: datetime) -> Outcome:
    """Makes the cluster as the endpoint wants it, and reports.

    Raises:
        KubeError: the API server could not be reached, or could not answer.
        NotLeading: another replica writes now.
    """
    endpoint = observe.endpoint(cluster.store, key)
    if endpoint and _is_behind(cluster.store, endpoint):
        endpoint = observe.fetch_endpoint(cluster.kube, key)
    if endpoint is None or endpoint.deleting:  # its objects go with it, by their owner references
        return Outcome.GONE
    operators = cluster.operators
    owner = Owner(key.name, key.namespace, endpoint.uid, operator=operators.own_name if operators else "")
    evaluation = evaluate(owner, endpoint.document, context)
    desired = {Child.of(each) for each in evaluation.objects}
    live = observe.children(cluster.store, owner, desired)
    if operators and operators.serving(key, live.get(Child("Deployment"))):
        return Outcome.YIELDED
    modes: Mapping[str, tuple[str, ...]] = {}
    if not is_held(endpoint, evaluation, live, MANAGER):
        live |= observe.unlabelled(cluster.kube, owner, desired - live.keys())
        modes = _access_modes(cluster, key, evaluation)
    decision = decide(endpoint, owner, evaluation, live, modes, MANAGER)

    # Only the API server has the schema of a pod template. A dry run there comes before anything is written.
    check = "Deployment" if evaluation.parsed and evaluation.parsed.spec.template.spec else ""
    applied = cluster.writer.apply(decision.objects, live, decision.unwanted, check=check)
    if operators:
        operators.observe(key, applied.live.get(Child("Deployment")))
    if check and applied.refused and applied.refused.kind == check:
        problem = f"the API server refuses the pods it makes: {applied.refusal}"
        decision = refuse(decision, Violation("spec.template", problem, "correct it", reason="InvalidTemplate"))

    workloads = {
        child.workload: _workload(cluster, decision, endpoint, child.workload, observe.rollout(each), now)
        for child, each in applied.live.items()
        if child.kind == "Deployment" and is_ours(owner, each)
    }
    seen = Observed(applied.live, applied.refusal, workloads, context.route)
    new_status = status(endpoint, decision, seen, now)
    if operators and new_status != endpoint.status and operators.replaces(key, new_status):
        return Outcome.YIELDED
    unchanged = cluster.writer.apply_status(endpoint, new_status, now, older_objects(decision, seen))
    if operators and new_status != endpoint.status:
        operators.wrote_status(key, new_status)
    if not unchanged:
        return Outcome.CHANGED
    if applied.refusal:
        return Outcome.REFUSED
    if decision.held:
        return Outcome.HELD
    moving = any(not each.rollout.complete for each in workloads.values())
    silent = any(each.silent for each in workloads.values()) and _ready_since(new_status) > now - _ASK_FOR
    return Outcome.MOVING if moving or decision.conflict or silent else Outcome.SETTLED


def report_failure(cluster: Cluster, key: Key, problem: str, now: datetime) -> None:
    """Reports that the operator itself fails to reconcile an endpoint.

    Raises:
        KubeError, NotLeading: as `reconcile`.
    """
    endpoint = observe.endpoint(cluster.store, key)
    if endpoint and not endpoint.deleting:
        cluster.writer.apply_status(endpoint, failed(endpoint, problem, now), now)


def _is_behind(store: Store, endpoint: Endpoint) -> bool:
    """Whether the endpoint is older than what its pods were made of."""
    owner = Owner(endpoint.key.name, endpoint.key.namespace, endpoint.uid)
    deployments = store.of_endpoint("Deployment", endpoint.key)
    return any(is_ours(owner, each) and is_behind(endpoint, each) for each in deployments)


def _workload(
    cluster: Cluster, decision: Decision, endpoint: Endpoint, name: str, rollout: Rollout, now: datetime
) -> ObservedWorkload:
    """What a workload has come to."""
    pods = observe.pods(cluster.store, endpoint.key, name)
    # Before the Deployment has taken the newest spec up, its pods' troubles may be those that it fixes.
    troubled = rollout.current and not rollout.complete
    trouble = _trouble(cluster, decision, endpoint.key, rollout, pods, now) if troubled else None
    reported = _reported(cluster, decision, endpoint, name, pods, moving=not rollout.complete)
    silent = reported is None and any(pod.ready for pod in pods)
    engines = cluster.engines(endpoint.key, name, _with_ranks(decision, name, pods))
    return ObservedWorkload(
        rollout, trouble, reported, silent, engines, _older(cluster, decision, endpoint, rollout, pods)
    )


def _older(
    cluster: Cluster, decision: Decision, endpoint: Endpoint, rollout: Rollout, pods: tuple[Pod, ...]
) -> tuple[OlderObject, ...]:
    """Objects that the spec names of which its pods run with an earlier state. While pods are replaced, some are about
    to go, and nothing is to be done."""
    parsed = decision.evaluation.parsed
    if parsed is None or not decision.objects or not rollout.complete:
        return ()
    return older(references(parsed.spec), lambda each: cluster.version(endpoint.key.namespace, each), pods)


def _with_ranks(decision: Decision, workload: str, pods: tuple[Pod, ...]) -> dict[str, str]:
    """Where the metrics are of the pods in which several processes of our engine compute."""
    if workload not in decision.pinned:
        return {}
    container = engine(decision.pinned[workload].deployment)
    if "command" in container or not any(word.startswith(_MULTI_PROCESS_FLAGS) for word in container.get("args", ())):
        return {}
    return {pod.name: metrics_url(container, pod.address) for pod in pods if pod.address and not pod.failed[0]}


def _access_modes(cluster: Cluster, key: Key, evaluation: Evaluation) -> dict[str, tuple[str, ...]]:
    """How the claims that a spec names may be mounted, by their names; without those that do not exist. Empty where
    there is never more than one pod."""
    spec = evaluation.parsed.spec if evaluation.parsed else None
    if spec is None or not spec.has_two_pods:
        return {}
    found = {each.name: observe.access_modes(cluster.kube, key.namespace, each.name) for each in named_claims(spec)}
    return {name: modes for name, modes in found.items() if modes is not None}


def _trouble(
    cluster: Cluster, decision: Decision, key: Key, rollout: Rollout, pods: tuple[Pod, ...], now: datetime
) -> Diagnosis | None:
    pods = tuple(observe.with_mount_failure(cluster.kube, key, pod, now) for pod in pods)
    room = ""
    nodes = observe.nodes(cluster.store)
    if decision.evaluation.plan and nodes and any(pod.unscheduled[0] == "Unschedulable" for pod in pods):
        placement = decision.evaluation.plan.placement
        # Whether a node is large enough is known without listing who holds what.
        room = capacity(nodes, (), placement.accelerator, placement.count)
        room = room or capacity(nodes, cluster.holders(), placement.accelerator, placement.count)
    return diagnose(pods, rollout, room)


def _reported(
    cluster: Cluster, decision: Decision, endpoint: Endpoint, workload: str, pods: tuple[Pod, ...], *, moving: bool
) -> Reported | None:
    """What the engine was found to have: requested, until it answers, for each image and way it is started."""
    if workload not in decision.pinned:
        return None
    deployment = decision.pinned[workload].deployment
    container = engine(deployment)
    earlier = reported_workload(endpoint, workload) or {}
    before = earlier.get("engine") or {}
    known = None
    if (earlier.get("image"), before.get("args")) == (
        image(deployment),
        reported_args(container),
    ) and "kvBlocks" in before:
        known = Reported(int(before["kvBlocks"]), before.get("kvCacheDtype", ""), before.get("weights", ""))
        # An operator that did not ask for them yet may have reported it.
        if known.weights or earlier.get("runtime") != "stoker":
            return known
    pod = next((pod for pod in pods if pod.ready and pod.address), None)
    if moving or pod is None:
        return known
    return cluster.reported(endpoint.key, workload, pod.name, metrics_url(container, pod.address)) or known


def _ready_since(reported: dict[str, Any]) -> datetime:
    """When it did, of a status that is reported; long ago, if it is not ready."""
    ready = next(each for each in reported["conditions"] if each["type"] == "Ready")
    if ready["status"] != "True":
        return datetime.min.replace(tzinfo=UTC)
    return datetime.fromisoformat(ready["lastTransitionTime"])
