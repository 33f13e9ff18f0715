"""The conditions of an endpoint. Pure.

    Accepted      the spec obeys the rules
    Planned       it is decided how the model is spread, and it fits; Unknown where the model's shape is not known
    Available     at least one pod serves, whatever its spec
    Progressing   pods are being created or replaced
    Stalled       something is in the way that does not pass by itself, be it that the operator fails to reconcile it
    Routed        the gateway serves it; only where there is a gateway, or it asks for one
    Scaling       the number of replicas follows requests; only with spec.scaling
    Degraded      an engine of the model does not serve, and others of its pod do; only where pods have several
    Ready         every replica serves, from the newest spec; its reason and message are the ones to read

Each condition states which generation of the spec it is about, and keeps the time of its last change.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final, NamedTuple

from stoker_engine.contract.engine_state import EngineState
from stoker_operator.objects.facts import Endpoint, EngineStates, Rollout
from stoker_operator.plan.planner import Plan
from stoker_operator.reconcile.addresses import serving_gateway
from stoker_operator.reconcile.decide import Decision
from stoker_operator.reconcile.diagnosis import Diagnosis, quota_exceeded
from stoker_operator.reconcile.observed import Observed
from stoker_operator.reconcile.scaling_status import scaling_condition

NO_ROLLOUT: Final = Rollout(current=False, desired=0, total=0, updated=0, ready=0, available=0)
#: The most characters the schema of a condition takes is more than anyone reads.
_MESSAGE: Final = 2048
_NO_REQUESTS: Final = "no requests come; the gateway holds the next one until a pod serves"
_ZERO: Final = "spec.replicas is 0"
_HELD: Final = "pods of the newest spec are made as soon as the model's config.json has been fetched, or does not come"
#: Pods that are named, of those that lack an engine or run with an earlier object.
_PODS: Final = 3
#: Of each of them, engines of which it is told why.
_COPIES: Final = 2
#: What a condition says of each; all of it is in `copyStates`.
_MESSAGE_LIMIT: Final = 200


class ConditionStatus(NamedTuple):
    """One condition, without what all conditions have."""

    status: str
    reason: str
    message: str


def conditions(decision: Decision, seen: Observed) -> dict[str, ConditionStatus]:
    """The conditions to report, by type."""
    trouble = trouble_of(decision, seen)
    return {
        "Accepted": _accepted(decision),
        "Planned": _planned(decision),
        "Available": _available(seen.rollout or NO_ROLLOUT),
        "Progressing": _progressing(decision, seen, trouble),
        "Stalled": _stalled(trouble),
        **_routed(decision, seen),
        **({"Scaling": ConditionStatus(*scaling_condition(seen.scaling))} if seen.scaling else {}),
        **_degraded(seen),
        "Ready": _ready(decision, seen, trouble),
    }


def _routed(decision: Decision, seen: Observed) -> dict[str, ConditionStatus]:
    route = seen.route
    if route is None:
        return {}
    if route.gateway and serving_gateway(decision, seen) is None:
        return {
            "Routed": ConditionStatus("False", "NoService", "the endpoint has no Service of its own; Ready says why")
        }
    return {"Routed": ConditionStatus("True" if route.gateway else "False", route.reason, route.message)}


def trouble_of(decision: Decision, seen: Observed) -> Diagnosis | None:
    """What is in the way, wherever it comes from."""
    evaluation = decision.evaluation
    if evaluation.violations:
        return Diagnosis(evaluation.violations[0].reason, "\n".join(map(str, evaluation.violations)), lasting=True)
    if decision.conflict:
        return Diagnosis("NameConflict", decision.conflict.message, decision.conflict.lasting)
    if "exceeded quota" in seen.refusal:
        return quota_exceeded(seen.refusal)
    if seen.refusal:
        return Diagnosis("ApplyFailed", f"the API server refuses an object of the endpoint: {seen.refusal}", True)
    return seen.trouble


def _accepted(decision: Decision) -> ConditionStatus:
    refused = decision.evaluation.refused
    if refused:
        return ConditionStatus("False", refused[0].reason, "\n".join(map(str, refused)))
    return ConditionStatus("True", "Accepted", "the spec obeys the rules")


def _planned(decision: Decision) -> ConditionStatus:
    evaluation = decision.evaluation
    if evaluation.unplannable:
        return ConditionStatus("False", evaluation.unplannable[0].reason, "\n".join(map(str, evaluation.unplannable)))
    if not evaluation.plans or len(evaluation.plans) < len(evaluation.workloads):
        return ConditionStatus("Unknown", "NotAccepted", "only an accepted spec is planned")
    several = len(evaluation.plans) > 1
    spreads = [
        f"workload {name}: {_spread(each)}" if several else _spread(each) for name, each in evaluation.plans.items()
    ]
    spread = "; ".join(spreads)
    if decision.held:
        return ConditionStatus("Unknown", "ModelUnknown", f"{spread}; {_HELD}")
    unknown = next((each for each in evaluation.plans.values() if each.estimate is None), None)
    if unknown:
        return ConditionStatus(
            "Unknown",
            "ModelUnknown",
            f"{spread}; whether the model fits is judged by the engine at its start: {unknown.unknown}",
        )
    return ConditionStatus("True", "Planned", spread)


def _spread(plan: Plan) -> str:
    """How the model is spread."""
    placement = plan.placement
    pipeline = f", pipeline {placement.pipeline}" if placement.pipeline > 1 else ""
    spread = f"each pod runs tensor {placement.tensor}{pipeline}, data {placement.data}"
    if placement.expert:
        spread += f", expert {placement.tensor * placement.data}"
    if plan.chosen_by:
        unknown = plan.estimate is None
        choice = "takes all accelerators for tensor, since the model is not known" if unknown else "chose"
        spread += f", as {plan.chosen_by} Auto {choice}"
    return "; ".join((spread, *plan.warnings))


def _available(rollout: Rollout) -> ConditionStatus:
    if rollout.available:
        counts = f"{rollout.available} of {rollout.desired} {_replicas(rollout)} serve"
        return ConditionStatus("True", "Available", counts)
    return ConditionStatus("False", "NoPodServes", "no pod serves")


def _progressing(decision: Decision, seen: Observed, trouble: Diagnosis | None) -> ConditionStatus:
    if trouble and (trouble.lasting or not (decision.objects or decision.held)):
        return ConditionStatus(
            "False", trouble.reason, "nothing changes until what keeps the endpoint from being ready is solved"
        )
    if decision.held:
        return ConditionStatus("True", "RollingOut", _HELD)
    if trouble and seen.placed:
        return ConditionStatus(
            "False", "RolledOut", "every pod runs the newest spec; Ready says why not all of them serve"
        )
    if not seen.complete:
        return ConditionStatus("True", "RollingOut", _progress(seen.unfinished or NO_ROLLOUT))
    newer = next((each.waiting for each in decision.pinned.values() if each.waiting), None)
    if newer:
        return ConditionStatus(
            "False",
            "NewerImageWaiting",
            f"every pod runs the newest spec; the catalogue's image is now {newer}, which is taken "
            "with the next change of the spec, or with spec.rollout.imageUpdates: Always",
        )
    return ConditionStatus("False", "RolledOut", "every pod runs the newest spec")


def _stalled(trouble: Diagnosis | None) -> ConditionStatus:
    if trouble and trouble.lasting:
        return ConditionStatus("True", trouble.reason, trouble.message)
    return ConditionStatus("False", "NotStalled", "nothing is in the way that waiting does not fix")


def _degraded(seen: Observed) -> dict[str, ConditionStatus]:
    every = [each for workload in seen.workloads.values() for each in sorted(workload.engines.items())]
    # Of a pod with one engine, or where none serves, readiness says it.
    pods = [
        (pod, states) for pod, states in every if len(states.engines) > 1 and len(states.down) < len(states.engines)
    ]
    if not pods:
        return {}
    down = [
        f"pod {pod}: {len(states.down)} of {len(states.engines)} engines {'does' if len(states.down) == 1 else 'do'} "
        f"not serve: {_reported_text(states)}"
        for pod, states in pods
        if states.down
    ]
    if not down:
        return {"Degraded": ConditionStatus("False", "EveryCopyServes", "every engine of the model serves")}
    rest_text = f"; and so in {len(down) - _PODS} more pods" if len(down) > _PODS else ""
    remedy = "the others of its pod serve; one that does not come back says why in the pod's log"
    return {"Degraded": ConditionStatus("True", "CopyDown", f"{'; '.join(down[:_PODS])}{rest_text}; {remedy}")}


def _reported_text(states: EngineStates) -> str:
    """What a pod says of its engines that do not serve."""
    texts = [
        f"engine {engine.number}{_lacks(engine)}{f': {engine.message[:_MESSAGE_LIMIT]}' if engine.message else ''}"
        for engine in states.down
    ]
    rest_text = f"; and {len(texts) - _COPIES} more" if len(texts) > _COPIES else ""
    return "; ".join(texts[:_COPIES]) + rest_text


def _lacks(engine: EngineState) -> str:
    if engine.ranks == 1 or not engine.missing_ranks:
        return ""
    missing = ", ".join(map(str, engine.missing_ranks))
    return f" lacks rank{'s' if len(engine.missing_ranks) > 1 else ''} {missing} of {engine.ranks}"


def _waited_for(seen: Observed) -> str:
    """What pods say of which no engine serves."""
    every = [each for workload in seen.workloads.values() for each in sorted(workload.engines.items())]
    texts = [
        f"; pod {pod}: {_reported_text(states)}" for pod, states in every if len(states.down) == len(states.engines)
    ]
    return "".join(texts[:_PODS])


def _ready(decision: Decision, seen: Observed, trouble: Diagnosis | None) -> ConditionStatus:
    rollout = seen.rollout
    if rollout is not None and seen.complete and decision.objects and not seen.refusal:
        if rollout.desired == 0:
            return ConditionStatus("True", "ScaledToZero", _NO_REQUESTS if seen.scaling else _ZERO)
        serving = f"{rollout.available} of {rollout.desired} {_replicas(rollout)} serve the newest spec"
        return ConditionStatus("True", "Ready", "; ".join((serving, *older_objects(decision, seen))))
    if scales := _scales(decision, seen, trouble):
        return scales
    if trouble:
        return ConditionStatus("False", trouble.reason, trouble.message)
    if decision.held:
        return ConditionStatus("False", "RollingOut", _HELD)
    if rollout is None:
        workload = decision.evaluation.serving
        kind = workload.kind.name if workload else "workload"
        return ConditionStatus("False", "RollingOut", f"the {kind} does not exist yet")
    return ConditionStatus("False", "RollingOut", _progress(seen.unfinished or rollout) + _waited_for(seen))


def _scales(decision: Decision, seen: Observed, trouble: Diagnosis | None) -> ConditionStatus | None:
    """What Ready is while only the number of pods changes: an endpoint that served goes on, also where its first pod
    starts after it had none."""
    rollout, scaling = seen.rollout, seen.scaling
    if rollout is None or scaling is None or not decision.objects or seen.refusal:
        return None
    # Until the new count has been taken in, it is not known which spec pods run, but for what was reported before.
    if rollout.updated < rollout.total if rollout.current else not scaling.was_ready:
        return None
    if rollout.desired == 0 and scaling.was_ready:
        return ConditionStatus("True", "ScaledToZero", _NO_REQUESTS)
    if rollout.available > 0:
        serving = f"{rollout.available} of {rollout.desired} {_replicas(rollout)} serve the newest spec"
        rest = f"; {trouble.message}" if trouble else "; the others start"
        return ConditionStatus("True", "Ready", serving + (rest if rollout.available < rollout.desired else ""))
    if trouble is None and scaling.was_asleep:
        return ConditionStatus("True", "Waking", "the first pod starts; the gateway holds requests until it serves")
    return None


def older_objects(decision: Decision, seen: Observed) -> list[str]:
    """What is said of Secrets and ConfigMaps of which pods run with an earlier state: one sentence each, and what
    renews them."""
    sentences = []
    for workload in seen.workloads.values():
        objects = " ".join(workload.objects)
        restart = f"kubectl rollout restart {objects} --namespace {decision.owner.namespace}"
        for each in workload.older:
            subject = f"{each.kind} {each.name} ({each.field}) as it was before {each.changed:%Y-%m-%dT%H:%M:%SZ}"
            sentences.append(f"{_named(each.pods)} with {subject}: {restart} renews them")
    return sentences


def _named(pods: tuple[str, ...]) -> str:
    rest_text = f" and {len(pods) - _PODS} more" if len(pods) > _PODS else ""
    return f"pod{'s' if len(pods) > 1 else ''} {', '.join(pods[:_PODS])}{rest_text} run{'' if len(pods) > 1 else 's'}"


def _progress(rollout: Rollout) -> str:
    serving = min(rollout.updated, rollout.available, rollout.desired)
    leaving = rollout.total - rollout.desired
    progress = f"{serving} of {rollout.desired} {_replicas(rollout)} serve the newest spec"
    if rollout.pods:
        progress += f", {rollout.pods.ready} of {rollout.pods.desired} pods are ready"
    return progress + (f"; {leaving} to go" if leaving > 0 else "")


def _replicas(rollout: Rollout) -> str:
    return "replicas" if rollout.pods else "pods"


def reported_conditions(
    endpoint: Endpoint, statuses: Mapping[str, ConditionStatus], now: datetime
) -> list[dict[str, Any]]:
    """`statuses` as a status lists them; where a status is as before, so is the time of its last change."""
    before = {each["type"]: each for each in endpoint.status.get("conditions", ())}
    reported = []
    for kind, verdict in statuses.items():
        last = before.get(kind, {})
        same = last.get("status") == verdict.status
        reported.append(
            {
                "type": kind,
                "status": verdict.status,
                "observedGeneration": endpoint.generation,
                "lastTransitionTime": last["lastTransitionTime"] if same else f"{now:%Y-%m-%dT%H:%M:%SZ}",
                "reason": verdict.reason,
                "message": verdict.message[:_MESSAGE],
            }
        )
    return reported
