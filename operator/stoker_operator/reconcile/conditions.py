"""The conditions of an endpoint. Pure.

    Accepted      the spec is valid
    Planned       the model's placement is decided, and the model fits; Unknown if that is not known
    Available     at least one pod accepts requests, whichever spec it runs
    Progressing   the rollout is not complete, and no problem stops it
    Stalled       a problem needs the user's action, or the operator fails to reconcile the endpoint
    Routed        the gateway serves the endpoint; only if there is a gateway, or the endpoint requests one
    Scaling       the number of replicas follows the load; only with spec.scaling
    Degraded      some engines of a pod do not accept requests, and others do; only if a pod runs several engines and
                  at least one accepts requests
    Ready         read this first: all replicas serve the newest spec, or there are none; with spec.scaling also while
                  some serve it and others start, and while the first one starts after scaling to zero

Each condition has the generation of the spec that it describes, and the time of its last transition.
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
#: Maximum length of a condition's message, in characters. The API server allows 32,768.
_MESSAGE: Final = 2048
_NO_REQUESTS: Final = "no requests arrive; the gateway holds the next one until a pod is ready"
_ZERO: Final = "spec.replicas is 0"
_HELD: Final = "pods of the newest spec are created once the model's config.json is fetched, or its fetch fails"
#: Maximum number of pods named in a message.
_PODS: Final = 3
#: Maximum number of engines described for each named pod.
_COPIES: Final = 2
#: Maximum length of an engine's message in a condition, in characters; `copyStates` has more of the message.
_MESSAGE_LIMIT: Final = 200


class ConditionStatus(NamedTuple):
    """Status, reason and message of one condition."""

    status: str
    reason: str
    message: str


def conditions(decision: Decision, seen: Observed) -> dict[str, ConditionStatus]:
    """Return the conditions to report, by type."""
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
            "Routed": ConditionStatus("False", "NoService", "the endpoint has no Service of its own; Ready reports why")
        }
    return {"Routed": ConditionStatus("True" if route.gateway else "False", route.reason, route.message)}


def trouble_of(decision: Decision, seen: Observed) -> Diagnosis | None:
    """Return the endpoint's most important problem, from the spec, the API server or the pods, or None."""
    evaluation = decision.evaluation
    if evaluation.violations:
        return Diagnosis(evaluation.violations[0].reason, "\n".join(map(str, evaluation.violations)), lasting=True)
    if decision.conflict:
        return Diagnosis("NameConflict", decision.conflict.message, decision.conflict.lasting)
    if "exceeded quota" in seen.refusal:
        return quota_exceeded(seen.refusal)
    if seen.refusal:
        return Diagnosis("ApplyFailed", f"the API server rejects an object of the endpoint: {seen.refusal}", True)
    return seen.trouble


def _accepted(decision: Decision) -> ConditionStatus:
    refused = decision.evaluation.refused
    if refused:
        return ConditionStatus("False", refused[0].reason, "\n".join(map(str, refused)))
    return ConditionStatus("True", "Accepted", "the spec is valid")


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
            f"{spread}; the engine checks when it starts whether the model fits: {unknown.unknown}",
        )
    return ConditionStatus("True", "Planned", spread)


def _spread(plan: Plan) -> str:
    """Describe the model's placement, and the plan's warnings."""
    placement = plan.placement
    pipeline = f", pipeline {placement.pipeline}" if placement.pipeline > 1 else ""
    spread = f"each pod runs tensor {placement.tensor}{pipeline}, data {placement.data}"
    if placement.expert:
        spread += f", expert {placement.tensor * placement.data}"
    if plan.chosen_by:
        unknown = plan.estimate is None
        choice = "uses all accelerators for tensor, because the model's shape is unknown" if unknown else "chose"
        spread += f", as {plan.chosen_by} Auto {choice}"
    return "; ".join((spread, *plan.warnings))


def _available(rollout: Rollout) -> ConditionStatus:
    if rollout.available:
        counts = f"{rollout.available} of {rollout.desired} {_replicas(rollout)} accept requests"
        return ConditionStatus("True", "Available", counts)
    return ConditionStatus("False", "NoPodServes", "no pod accepts requests")


def _progressing(decision: Decision, seen: Observed, trouble: Diagnosis | None) -> ConditionStatus:
    if trouble and (trouble.lasting or not (decision.objects or decision.held)):
        return ConditionStatus("False", trouble.reason, "nothing changes until the problem that Ready reports is fixed")
    if decision.held:
        return ConditionStatus("True", "RollingOut", _HELD)
    if trouble and seen.placed:
        return ConditionStatus(
            "False", "RolledOut", "every pod runs the newest spec; Ready reports why some pods are not ready"
        )
    if not seen.complete:
        return ConditionStatus("True", "RollingOut", _progress(seen.unfinished or NO_ROLLOUT))
    newer = next((each.waiting for each in decision.pinned.values() if each.waiting), None)
    if newer:
        return ConditionStatus(
            "False",
            "NewerImageWaiting",
            f"every pod runs the newest spec; the catalogue's image is now {newer}, which pods get "
            "with the next change of the spec, or with spec.rollout.imageUpdates: Always",
        )
    return ConditionStatus("False", "RolledOut", "every pod runs the newest spec")


def _stalled(trouble: Diagnosis | None) -> ConditionStatus:
    if trouble and trouble.lasting:
        return ConditionStatus("True", trouble.reason, trouble.message)
    return ConditionStatus("False", "NotStalled", "no problem needs the user's action")


def _degraded(seen: Observed) -> dict[str, ConditionStatus]:
    every = [each for workload in seen.workloads.values() for each in sorted(workload.engines.items())]
    # Ready covers pods with one engine, and pods in which no engine accepts requests.
    pods = [
        (pod, states) for pod, states in every if len(states.engines) > 1 and len(states.down) < len(states.engines)
    ]
    if not pods:
        return {}
    down = [
        f"pod {pod}: {len(states.down)} of {len(states.engines)} engines {'does' if len(states.down) == 1 else 'do'} "
        f"not accept requests: {_reported_text(states)}"
        for pod, states in pods
        if states.down
    ]
    if not down:
        return {"Degraded": ConditionStatus("False", "EveryCopyServes", "every engine accepts requests")}
    rest_text = f"; the same in {len(down) - _PODS} more pods" if len(down) > _PODS else ""
    remedy = "the pod's other engines accept requests; if an engine does not recover, see the pod's log"
    return {"Degraded": ConditionStatus("True", "CopyDown", f"{'; '.join(down[:_PODS])}{rest_text}; {remedy}")}


def _reported_text(states: EngineStates) -> str:
    """Describe a pod's engines that do not accept requests, as the pod reports them."""
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
    """Describe the pods in which no engine accepts requests."""
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
        serving = f"{rollout.available} of {rollout.desired} {_replicas(rollout)} are ready with the newest spec"
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
    """Return Ready while only the number of pods changes, or None if Ready must be decided otherwise.

    A ready endpoint stays ready while its first pod starts after scaling to zero, unless there is a problem.
    """
    rollout, scaling = seen.rollout, seen.scaling
    if rollout is None or scaling is None or not decision.objects or seen.refusal:
        return None
    # The rollout is not current until the workload's controller has observed the new count; until then, the last
    # reported Ready is used.
    if rollout.updated < rollout.total if rollout.current else not scaling.was_ready:
        return None
    if rollout.desired == 0 and scaling.was_ready:
        return ConditionStatus("True", "ScaledToZero", _NO_REQUESTS)
    if rollout.available > 0:
        serving = f"{rollout.available} of {rollout.desired} {_replicas(rollout)} are ready with the newest spec"
        rest = f"; {trouble.message}" if trouble else "; the others are starting"
        return ConditionStatus("True", "Ready", serving + (rest if rollout.available < rollout.desired else ""))
    if trouble is None and scaling.was_asleep:
        return ConditionStatus(
            "True", "Waking", "the first pod is starting; the gateway holds requests until it is ready"
        )
    return None


def older_objects(decision: Decision, seen: Observed) -> list[str]:
    """Return one sentence for each Secret and ConfigMap that changed after pods read it, with the command to restart
    the workload's pods."""
    sentences = []
    for workload in seen.workloads.values():
        objects = " ".join(workload.objects)
        restart = f"kubectl rollout restart {objects} --namespace {decision.owner.namespace}"
        for each in workload.older:
            subject = f"{each.kind} {each.name} ({each.field}) as it was before {each.changed:%Y-%m-%dT%H:%M:%SZ}"
            sentences.append(f"{_named(each.pods)} with {subject}: {restart} updates them")
    return sentences


def _named(pods: tuple[str, ...]) -> str:
    rest_text = f" and {len(pods) - _PODS} more" if len(pods) > _PODS else ""
    return f"pod{'s' if len(pods) > 1 else ''} {', '.join(pods[:_PODS])}{rest_text} run{'' if len(pods) > 1 else 's'}"


def _progress(rollout: Rollout) -> str:
    serving = min(rollout.updated, rollout.available, rollout.desired)
    leaving = rollout.total - rollout.desired
    progress = f"{serving} of {rollout.desired} {_replicas(rollout)} are ready with the newest spec"
    if rollout.pods:
        progress += f", {rollout.pods.ready} of {rollout.pods.desired} pods are ready"
    return progress + (f"; {leaving} left to remove" if leaving > 0 else "")


def _replicas(rollout: Rollout) -> str:
    return "replicas" if rollout.pods else "pods"


def reported_conditions(
    endpoint: Endpoint, statuses: Mapping[str, ConditionStatus], now: datetime
) -> list[dict[str, Any]]:
    """Return the conditions as the endpoint's status lists them.

    A condition whose status (True, False, Unknown) is unchanged keeps its lastTransitionTime.
    """
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
