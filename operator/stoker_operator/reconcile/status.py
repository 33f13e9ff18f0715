"""Computes an endpoint's status from what was observed and decided. Pure; the time is an argument."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from stoker_operator.objects.facts import Endpoint
from stoker_operator.reconcile.addresses import addresses
from stoker_operator.reconcile.conditions import NO_ROLLOUT, ConditionStatus, conditions, reported_conditions
from stoker_operator.reconcile.decide import Decision
from stoker_operator.reconcile.observed import Observed
from stoker_operator.reconcile.scaling_status import scaling_status
from stoker_operator.reconcile.workload_status import workloads_status


def status(endpoint: Endpoint, decision: Decision, seen: Observed, now: datetime) -> dict[str, Any]:
    """Return the status to report."""
    rollout = seen.rollout or NO_ROLLOUT
    reported: dict[str, Any] = {
        "observedGeneration": endpoint.generation,
        "replicas": rollout.total,
        "readyReplicas": rollout.ready,
        "updatedReplicas": rollout.updated,
        "availableReplicas": rollout.available,
        "desiredReplicas": _desired(endpoint, decision, seen),
        "selector": _selector(endpoint, decision),
        "conditions": reported_conditions(endpoint, conditions(decision, seen), now),
    }
    if seen.scaling is not None:
        reported["scaling"] = scaling_status(seen.scaling)
    elif decision.evaluation.serving is None and "scaling" in endpoint.status:  # the manifest cannot be parsed
        reported["scaling"] = endpoint.status["scaling"]
    return reported | addresses(decision, seen) | workloads_status(endpoint, decision, seen)


def _desired(endpoint: Endpoint, decision: Decision, seen: Observed) -> int:
    """Return the desired number of replicas."""
    if seen.scaling is not None:
        return seen.scaling.replicas
    serving = decision.evaluation.serving
    if serving is None:
        return int(endpoint.status.get("desiredReplicas", 0))
    return serving.spec.replicas


def _selector(endpoint: Endpoint, decision: Decision) -> str:
    """Return the label selector of the scale subresource: the pods that an autoscaler observes."""
    serving = decision.evaluation.serving
    if serving is None and endpoint.status.get("selector"):
        return str(endpoint.status["selector"])
    pods = serving.kind.request_pods(decision.owner.of(serving.name)) if serving else decision.owner.selector()
    return ",".join(f"{name}={value}" for name, value in pods.items())


def failed(endpoint: Endpoint, problem: str, now: datetime) -> dict[str, Any]:
    """Return the status of an endpoint that the operator fails to reconcile: the last status, with `problem`.

    Ready is kept if it describes the same generation, because the pods are not known to have changed.
    """
    earlier = {each["type"]: each for each in endpoint.status.get("conditions", ())}
    verdict = ConditionStatus("True", "ReconcileError", problem)
    statuses = {"Stalled": verdict}
    if earlier.get("Ready", {}).get("observedGeneration") != endpoint.generation:
        statuses["Ready"] = verdict._replace(status="False")
    changed = {each["type"]: each for each in reported_conditions(endpoint, statuses, now)}
    kept = {kind: each for kind, each in earlier.items() if kind != "Ready" or kind not in changed}
    return {
        **endpoint.status,
        "observedGeneration": endpoint.generation,
        "conditions": list((kept | changed).values()),
    }
