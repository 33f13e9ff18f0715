"""Facts and decision → what the endpoint's status says. Pure; the time is an argument.

    Accepted      the spec obeys the rules
    Planned       it is decided how the model is spread, and it fits; Unknown where nobody knows the model's shape
    Available     at least one pod serves, whatever its spec
    Progressing   pods are being created or replaced
    Stalled       something is in the way that no waiting mends
    Ready         every replica serves, from the newest spec; its reason and message are the ones to read

Each condition says which generation of the spec it is about, and keeps the time of its last change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NamedTuple

from stoker_operator.decide import Decision, is_ours
from stoker_operator.diagnosis import Diagnosis, quota_exceeded
from stoker_operator.facts import Endpoint, Object, Rollout
from stoker_operator.manifests.service import url
from stoker_operator.pinning import engine, image
from stoker_operator.plan.planner import Plan

_NONE: Final = Rollout(current=False, desired=0, total=0, updated=0, ready=0, available=0)
#: The most characters the schema of a condition takes is more than anyone reads.
_MESSAGE: Final = 2048
#: A longer word of the engine's command line, such as a chat template, is told by its beginning.
_WORD: Final = 256


class Verdict(NamedTuple):
    """One condition, without what all conditions have."""

    status: str
    reason: str
    message: str


@dataclass(frozen=True)
class Seen:
    """What came of a decision.

    Attributes:
        live: the objects of the endpoint's name that there are, by kind.
        refusal: what the API server said of one that it would not take.
        rollout: how far the Deployment has got, where there is one and it is the endpoint's.
        trouble: why pods do not serve.
        kv_blocks: blocks of the KV cache that the engine allocated, where it has been asked.
    """

    live: Mapping[str, Object]
    refusal: str = ""
    rollout: Rollout | None = None
    trouble: Diagnosis | None = None
    kv_blocks: int | None = None


def status(endpoint: Endpoint, decision: Decision, seen: Seen, now: datetime) -> dict[str, Any]:
    """The status to report."""
    rollout = seen.rollout or _NONE
    trouble = _trouble(decision, seen)
    ready = _ready(decision, seen, trouble)
    verdicts = {
        "Accepted": _accepted(decision),
        "Planned": _planned(decision),
        "Available": _available(rollout),
        "Progressing": _progressing(decision, rollout, trouble),
        "Stalled": _stalled(trouble),
        "Ready": ready,
    }
    reported: dict[str, Any] = {
        "observedGeneration": endpoint.generation,
        "replicas": rollout.total,
        "readyReplicas": rollout.ready,
        "updatedReplicas": rollout.updated,
        "availableReplicas": rollout.available,
        "selector": ",".join(f"{name}={value}" for name, value in decision.owner.selector().items()),
        "conditions": _conditions(endpoint, verdicts, now),
    }
    return reported | _where(decision, seen.live) | _workloads(endpoint, decision, seen)


def _where(decision: Decision, live: Mapping[str, Object]) -> dict[str, Any]:
    """Where clients reach the endpoint."""
    parsed, service = decision.judgement.parsed, live.get("Service")
    if parsed is None or service is None or not is_ours(decision.owner, service):
        return {}
    internal = url(decision.owner, parsed.spec)
    addresses = [{"name": "cluster", "url": internal}]
    scheme, _, rest = internal.partition("://")
    port = rest.partition("/")[0].rpartition(":")[2]
    balancer: Any = (service.get("status") or {}).get("loadBalancer") or {}
    for ingress in balancer.get("ingress") or ():
        host = ingress.get("hostname") or ingress.get("ip")
        if host:
            host = f"[{host}]" if ":" in host else host
            name = "loadBalancer" if len(addresses) == 1 else f"loadBalancer-{len(addresses)}"
            addresses.append({"name": name, "url": f"{scheme}://{host}:{port}/v1"})
    return {"url": internal, "addresses": addresses}


def _workloads(endpoint: Endpoint, decision: Decision, seen: Seen) -> dict[str, Any]:
    """What runs. Where the spec is refused that is what the one before was made to."""
    before = endpoint.status.get("workloads")
    if decision.pinned is None or decision.judgement.plan is None or decision.judgement.parsed is None:
        return {"workloads": before} if before else {}
    deployment = decision.pinned.deployment
    told: dict[str, Any] = {"args": told_args(engine(deployment))}
    if seen.kv_blocks is not None:
        told["kvBlocks"] = seen.kv_blocks
    numbers = _plan(decision.judgement.plan)
    if decision.pinned.differs and before:
        numbers = before[0]["plan"]  # of the pods that run
    return {
        "workloads": [
            {
                "name": "main",
                "runtime": decision.judgement.parsed.spec.engine.runtime,
                "image": image(deployment),
                "plan": numbers,
                "engine": told,
            }
        ]
    }


def _plan(plan: Plan) -> dict[str, int]:
    placement, estimate = plan.placement, plan.estimate
    numbers: dict[str, int | None] = {
        "tensor": placement.tensor,
        "pipeline": placement.pipeline,
        "data": placement.data,
        "maxModelLen": plan.max_model_len,
    }
    if estimate:
        numbers |= {
            "weightBytesPerGpu": estimate.weight_bytes_per_gpu,
            "kvTokensPerCopy": estimate.kv_tokens_per_copy,
            "kvBlocks": estimate.kv_blocks,
            "maxModelLen": estimate.max_model_len,
            "maxConcurrency": estimate.max_concurrency,
        }
    return {name: number for name, number in numbers.items() if number is not None}


def told_args(container: Mapping[str, Any]) -> list[str]:
    """The engine's command line, as it is reported."""
    return [word if len(word) <= _WORD else f"{word[:_WORD]}…" for word in container.get("args", ())]


def _trouble(decision: Decision, seen: Seen) -> Diagnosis | None:
    """What is in the way, wherever it comes from."""
    judgement = decision.judgement
    if judgement.violations:
        return Diagnosis(judgement.violations[0].reason, "\n".join(map(str, judgement.violations)), lasting=True)
    if decision.conflict:
        return Diagnosis("NameConflict", decision.conflict.message, decision.conflict.lasting)
    if "exceeded quota" in seen.refusal:
        return quota_exceeded(seen.refusal)
    if seen.refusal:
        return Diagnosis("ApplyFailed", f"the API server refuses an object of the endpoint: {seen.refusal}", True)
    return seen.trouble


def _accepted(decision: Decision) -> Verdict:
    refused = decision.judgement.refused
    if refused:
        return Verdict("False", refused[0].reason, "\n".join(map(str, refused)))
    return Verdict("True", "Accepted", "the spec obeys the rules")


def _planned(decision: Decision) -> Verdict:
    judgement = decision.judgement
    if judgement.unplannable:
        return Verdict("False", judgement.unplannable[0].reason, "\n".join(map(str, judgement.unplannable)))
    if judgement.plan is None:
        return Verdict("Unknown", "NotAccepted", "only an accepted spec is planned")
    placement = judgement.plan.placement
    pipeline = f", pipeline {placement.pipeline}" if placement.pipeline > 1 else ""
    spread = f"each pod runs tensor {placement.tensor}{pipeline}, data {placement.data}"
    spread = "; ".join((spread, *judgement.plan.warnings))
    if judgement.plan.estimate is None:
        return Verdict(
            "Unknown",
            "ModelUnknown",
            f"{spread}; whether the model fits is judged by the engine at its start: {judgement.plan.unknown}",
        )
    return Verdict("True", "Planned", spread)


def _available(rollout: Rollout) -> Verdict:
    if rollout.available:
        return Verdict("True", "Available", f"{rollout.available} of {rollout.desired} pods serve")
    return Verdict("False", "NoPodServes", "no pod serves")


def _progressing(decision: Decision, rollout: Rollout, trouble: Diagnosis | None) -> Verdict:
    if trouble and (trouble.lasting or not decision.objects):
        return Verdict(
            "False", trouble.reason, "nothing changes until what keeps the endpoint from being ready is solved"
        )
    if not rollout.complete:
        return Verdict("True", "RollingOut", _progress(rollout))
    if decision.pinned and decision.pinned.waiting:
        return Verdict(
            "False",
            "NewerImageWaiting",
            f"every pod runs the newest spec; the catalogue's image is now {decision.pinned.waiting}, which is taken "
            "with the next change of the spec, or with spec.rollout.imageUpdates: Always",
        )
    return Verdict("False", "RolledOut", "every pod runs the newest spec")


def _stalled(trouble: Diagnosis | None) -> Verdict:
    if trouble and trouble.lasting:
        return Verdict("True", trouble.reason, trouble.message)
    return Verdict("False", "NotStalled", "nothing is in the way that waiting does not mend")


def _ready(decision: Decision, seen: Seen, trouble: Diagnosis | None) -> Verdict:
    rollout = seen.rollout
    if rollout is not None and rollout.complete and decision.objects and not seen.refusal:
        if rollout.desired == 0:
            return Verdict("True", "ScaledToZero", "spec.replicas is 0")
        return Verdict("True", "Ready", f"{rollout.available} of {rollout.desired} pods serve the newest spec")
    if trouble:
        return Verdict("False", trouble.reason, trouble.message)
    if rollout is None:
        return Verdict("False", "RollingOut", "the Deployment does not exist yet")
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
