"""Facts and decision → what the endpoint's status says. Pure; the time is an argument.

    Accepted      the spec obeys the rules
    Planned       it is decided how the model is spread
    Available     at least one pod serves, whatever its spec
    Progressing   pods are being created or replaced
    Ready         every replica serves, from the newest spec; its reason and message are the ones to read

Each condition says which generation of the spec it is about, and keeps the time of its last change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Final, NamedTuple

from stoker_operator.decide import Decision, is_ours
from stoker_operator.diagnosis import diagnose
from stoker_operator.facts import Endpoint, Object, Pod, Rollout
from stoker_operator.manifests.service import url

_NONE: Final = Rollout(current=False, desired=0, total=0, updated=0, ready=0, available=0)
#: The most characters the schema of a condition takes is more than anyone reads.
_MESSAGE: Final = 2048


class Verdict(NamedTuple):
    """One condition, without what all conditions have."""

    status: str
    reason: str
    message: str


def status(
    endpoint: Endpoint,
    decision: Decision,
    refusal: str,
    live: Mapping[str, Object],
    rollout: Rollout | None,
    pods: Iterable[Pod],
    now: datetime,
) -> dict[str, Any]:
    """The status to report.

    Args:
        endpoint: whose status it is.
        decision: what should exist.
        refusal: what the API server said of an object it would not take.
        live: what exists, by kind.
        rollout: how far the Deployment has got, where it is the endpoint's.
        pods: the pods, looked at only where they do not all serve.
        now: the time.
    """
    seen = rollout or _NONE
    ready = _ready(decision, refusal, rollout, pods)
    verdicts = {
        "Accepted": _accepted(decision),
        "Planned": _planned(decision),
        "Available": _available(seen),
        "Progressing": _progressing(decision, refusal, seen, ready),
        "Ready": ready,
    }
    reported: dict[str, Any] = {
        "observedGeneration": endpoint.generation,
        "replicas": seen.total,
        "readyReplicas": seen.ready,
        "updatedReplicas": seen.updated,
        "availableReplicas": seen.available,
        "selector": ",".join(f"{name}={value}" for name, value in decision.owner.selector().items()),
        "conditions": _conditions(endpoint, verdicts, now),
    }
    if decision.parsed and "Service" in live and is_ours(decision.owner, live["Service"]):
        reported["url"] = url(decision.owner, decision.parsed.spec)
    if decision.plan:
        placement = decision.plan.placement
        sizes = {"tensor": placement.tensor, "data": placement.data}
        reported["workloads"] = [{"name": "main", "image": decision.plan.image, "plan": sizes}]
    elif "workloads" in endpoint.status:
        reported["workloads"] = endpoint.status["workloads"]  # of the spec before, which is what runs
    return reported


def _accepted(decision: Decision) -> Verdict:
    if decision.violations:
        return Verdict("False", decision.violations[0].reason, "\n".join(map(str, decision.violations)))
    return Verdict("True", "Accepted", "the spec obeys the rules")


def _planned(decision: Decision) -> Verdict:
    if decision.plan is None:
        return Verdict("Unknown", "NotAccepted", "only an accepted spec is planned")
    placement = decision.plan.placement
    return Verdict("True", "Planned", f"each pod runs tensor {placement.tensor}, data {placement.data}")


def _available(rollout: Rollout) -> Verdict:
    if rollout.available:
        return Verdict("True", "Available", f"{rollout.available} of {rollout.desired} pods serve")
    return Verdict("False", "NoPodServes", "no pod serves")


def _progressing(decision: Decision, refusal: str, rollout: Rollout, ready: Verdict) -> Verdict:
    if decision.violations or decision.conflict or refusal:
        return Verdict(
            "False", ready.reason, "nothing changes until what keeps the endpoint from being ready is solved"
        )
    if rollout.complete:
        return Verdict("False", "RolledOut", "every pod runs the newest spec")
    return Verdict("True", "RollingOut", _progress(rollout))


def _ready(decision: Decision, refusal: str, rollout: Rollout | None, pods: Iterable[Pod]) -> Verdict:
    if decision.violations:
        return Verdict("False", decision.violations[0].reason, "\n".join(map(str, decision.violations)))
    if decision.conflict:
        return Verdict("False", "NameConflict", decision.conflict)
    if refusal:
        return Verdict("False", "ApplyFailed", f"the API server refuses an object of the endpoint: {refusal}")
    if rollout is None:
        return Verdict("False", "RollingOut", "the Deployment does not exist yet")
    if rollout.complete and rollout.desired == 0:
        return Verdict("True", "ScaledToZero", "spec.replicas is 0")
    if rollout.complete:
        return Verdict("True", "Ready", f"{rollout.available} of {rollout.desired} pods serve the newest spec")
    trouble = diagnose(pods)
    if trouble:
        return Verdict("False", *trouble)
    if rollout.failure:
        return Verdict("False", "PodsRefused", f"the cluster refuses to create pods: {rollout.failure}")
    return Verdict("False", "RollingOut", _progress(rollout))


def _progress(rollout: Rollout) -> str:
    serving = min(rollout.updated, rollout.available, rollout.desired)
    leaving = rollout.total - rollout.desired
    return f"{serving} of {rollout.desired} pods serve the newest spec" + (f"; {leaving} to go" if leaving > 0 else "")


def _conditions(endpoint: Endpoint, verdicts: Mapping[str, Verdict], now: datetime) -> list[dict[str, Any]]:
    before = {each["type"]: each for each in endpoint.status.get("conditions", ())}
    conditions = []
    for kind, verdict in verdicts.items():
        last = before.get(kind, {})
        same = last.get("status") == verdict.status
        conditions.append(
            {
                "type": kind,
                "status": verdict.status,
                "observedGeneration": endpoint.generation,
                "lastTransitionTime": last["lastTransitionTime"] if same else f"{now:%Y-%m-%dT%H:%M:%SZ}",
                "reason": verdict.reason,
                "message": verdict.message[:_MESSAGE],
            }
        )
    return conditions
