"""Reconciles one endpoint: observe, evaluate, decide, apply, report.

Level-based: it reads the current state and not the events, so it may be called at any time and any number of times,
also after lost events and after a restart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Any, Final

from stoker_operator.api.violation import Violation
from stoker_operator.cluster import observe
from stoker_operator.cluster.store import Store
from stoker_operator.manifests.storage import named_claims
from stoker_operator.objects.facts import MAIN, Child, Endpoint, Key, Object
from stoker_operator.objects.owner import Owner, operator_of
from stoker_operator.reconcile.apply import MANAGER
from stoker_operator.reconcile.cluster import Cluster
from stoker_operator.reconcile.conditions import older_objects, trouble_of
from stoker_operator.reconcile.decide import Decision, decide, is_held, is_ours, refuse
from stoker_operator.reconcile.evaluate import Evaluation, PlanningContext, evaluate
from stoker_operator.reconcile.observe_workload import observe_workload
from stoker_operator.reconcile.observed import Observed
from stoker_operator.reconcile.pinning import is_behind
from stoker_operator.reconcile.scaling_status import ObservedScaling, observe_scaling
from stoker_operator.reconcile.status import failed, status
from stoker_operator.workloads.composition import Composition
from stoker_operator.workloads.kind import WorkloadKind

#: Maximum time after an endpoint became ready in which its engine is polled for its KV blocks.
_ASK_FOR: Final = timedelta(minutes=2)


class Outcome(Enum):
    """The result of one reconcile.

    GONE: the endpoint does not exist, or is being deleted. CHANGED: its spec changed during the reconcile. SETTLED:
    nothing is left to do until something changes. MOVING: pods are not ready, an engine has not reported yet, or an
    object of another owner has the name of one of the endpoint's objects. HELD: pods wait for the model's config.json.
    REFUSED: the API server rejects an object. YIELDED: another operator serves the endpoint, or another writer keeps
    replacing its status.
    """

    GONE = "gone"
    CHANGED = "changed"
    SETTLED = "settled"
    MOVING = "moving"
    HELD = "held"
    REFUSED = "refused"
    YIELDED = "yielded"


def reconcile(cluster: Cluster, context: PlanningContext, key: Key, now: datetime) -> Outcome:
    """Apply the objects of an endpoint and report its status.

    Raises:
        KubeError: a request to the API server failed.
        NotLeading: this replica of the operator no longer leads.
    """
    composition = context.composition
    endpoint = observe.endpoint(cluster.store, key)
    if endpoint and _is_behind(cluster.store, endpoint, composition):
        endpoint = observe.fetch_endpoint(cluster.kube, key)
    if endpoint is None or endpoint.deleting:  # Kubernetes deletes its objects, because of their owner references
        return Outcome.GONE
    operators = cluster.operators
    owner = Owner(key.name, key.namespace, endpoint.uid, operator=operators.own_name if operators else "")
    known = observe.children(cluster.store, owner, (), composition.kinds)
    evaluation = evaluate(owner, endpoint.document, context, live=known)
    desired = {Child.of(each) for each in evaluation.objects}
    live = observe.children(cluster.store, owner, desired, composition.kinds)
    if operators and operators.serving(key, _with_operator(live, composition)):
        return Outcome.YIELDED
    modes: Mapping[str, tuple[str, ...]] = {}
    if not is_held(endpoint, evaluation, live, MANAGER):
        live |= observe.unlabelled(cluster.kube, owner, desired - live.keys())
        modes = _access_modes(cluster, key, evaluation)
    decision = decide(endpoint, owner, evaluation, live, modes, MANAGER, composition)

    # Only the API server has a pod template's schema, so it validates users' templates in a dry run before any write.
    from_users = [each.kind for each in evaluation.workloads if each.spec.template.spec]
    check = {each.name for each in from_users if each.dry_run}
    pods = {each.name for each in composition.kinds}
    applied = cluster.writer.apply(decision.objects, live, decision.unwanted, pods=pods, check=check)
    if operators:
        operators.observe(key, _with_operator(applied.live, composition))
    if applied.refused and applied.refused.kind in check:
        problem = f"the API server rejects the pods of this template: {applied.refusal}"
        decision = refuse(decision, Violation("spec.template", problem, "correct it", reason="InvalidTemplate"))

    workloads = {
        name: observe_workload(cluster, decision, endpoint, name, kind, objects, now)
        for name, (kind, objects) in _running(applied.live, owner, composition).items()
    }
    seen = Observed(applied.live, applied.refusal, workloads, context.route, _serving(evaluation))
    seen = dataclasses.replace(seen, scaling=_scaling(endpoint, decision, context, seen))
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
    """Report in an endpoint's status that the operator fails to reconcile it.

    Raises:
        KubeError, NotLeading: as `reconcile`.
    """
    endpoint = observe.endpoint(cluster.store, key)
    if endpoint and not endpoint.deleting:
        cluster.writer.apply_status(endpoint, failed(endpoint, problem, now), now)


def _is_behind(store: Store, endpoint: Endpoint, composition: Composition) -> bool:
    """Return whether the stored endpoint has an older generation than an object that runs its pods."""
    owner = Owner(endpoint.key.name, endpoint.key.namespace, endpoint.uid)
    objects = (each for kind in composition.kinds for each in store.of_endpoint(kind.name, endpoint.key))
    return any(is_ours(owner, each) and is_behind(endpoint, each) for each in objects)


def _with_operator(live: Mapping[Child, Object], composition: Composition) -> Object | None:
    """Return an object that runs the endpoint's pods, preferably with an operator's name; None if there is none."""
    objects = [each for child, each in live.items() if composition.kind(child.kind)]
    return next((each for each in objects if operator_of(each)), objects[0] if objects else None)


def _running(
    live: Mapping[Child, Object], owner: Owner, composition: Composition
) -> dict[str, tuple[WorkloadKind, list[Object]]]:
    """Return the endpoint's own objects that run pods, with their kind, by workload."""
    found: dict[str, tuple[WorkloadKind, list[Object]]] = {}
    for child, each in live.items():
        kind = composition.kind(child.kind)
        if kind and is_ours(owner, each):
            workload = found.setdefault(child.workload, (kind, []))
            if workload[0] is kind:
                workload[1].append(each)
    return found


def _serving(evaluation: Evaluation) -> str:
    """Return the name of the workload whose pods answer requests; `MAIN` if the spec cannot be parsed."""
    return evaluation.serving.name if evaluation.serving else MAIN


def _scaling(
    endpoint: Endpoint, decision: Decision, context: PlanningContext, seen: Observed
) -> ObservedScaling | None:
    """Return the endpoint's scaling, or None without ``spec.scaling`` or if the spec cannot be parsed."""
    serving = decision.evaluation.serving
    if serving is None or serving.spec.scaling is None:
        return None
    replicas = seen.rollout.desired if seen.rollout else serving.spec.first_replicas
    return observe_scaling(endpoint, context.scaling, replicas, seen.rollout, trouble_of(decision, seen))


def _access_modes(cluster: Cluster, key: Key, evaluation: Evaluation) -> dict[str, tuple[str, ...]]:
    """Return the access modes of the claims that a spec names, by name.

    Missing claims are omitted, and so are the claims of workloads that never have more than one pod.
    """
    specs = (each.spec for each in evaluation.workloads if each.spec.has_two_pods)
    names = {each.name for spec in specs for each in named_claims(spec)}
    found = {name: observe.access_modes(cluster.kube, key.namespace, name) for name in sorted(names)}
    return {name: modes for name, modes in found.items() if modes is not None}


def _ready_since(reported: dict[str, Any]) -> datetime:
    """Return since when a status reports the endpoint as ready; the minimum datetime if it does not."""
    ready = next(each for each in reported["conditions"] if each["type"] == "Ready")
    if ready["status"] != "True":
        return datetime.min.replace(tzinfo=UTC)
    return datetime.fromisoformat(ready["lastTransitionTime"])
