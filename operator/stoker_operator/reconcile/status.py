"""Facts and decision → the endpoint's status. Pure; the time is an argument.

    Accepted      the spec obeys the rules
    Planned       it is decided how the model is spread, and it fits; Unknown where the model's shape is not known
    Available     at least one pod serves, whatever its spec
    Progressing   pods are being created or replaced
    Stalled       something is in the way that does not pass by itself, be it that the operator fails to reconcile it
    Routed        the gateway serves it; only where there is a gateway, or it asks for one
    Degraded      an engine of the model does not serve, and others of its pod do; only where pods have several
    Ready         every replica serves, from the newest spec; its reason and message are the ones to read

Each condition states which generation of the spec it is about, and keeps the time of its last change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, NamedTuple

from stoker_engine.contract.engine_state import EngineState
from stoker_operator.api.v1alpha1.status import MAX_ENGINE_STATES
from stoker_operator.manifests.service import url
from stoker_operator.objects.facts import (
    MAIN,
    Child,
    Endpoint,
    EngineStates,
    Object,
    OlderObject,
    Reported,
    Rollout,
)
from stoker_operator.plan.planner import Plan
from stoker_operator.reconcile.decide import Decision, is_ours
from stoker_operator.reconcile.diagnosis import Diagnosis, quota_exceeded
from stoker_operator.reconcile.pinning import engine, image
from stoker_operator.reconcile.routing import Route
from stoker_operator.settings import GatewaySettings

_NONE: Final = Rollout(current=False, desired=0, total=0, updated=0, ready=0, available=0)
#: The most characters the schema of a condition takes is more than anyone reads.
_MESSAGE: Final = 2048
_HELD: Final = "pods of the newest spec are made as soon as the model's config.json has been fetched, or does not come"
#: Ways to reach the API that are listed.
_ADDRESSES: Final = 16
#: Pods that are named, of those that lack an engine or run with an earlier object.
_PODS: Final = 3
#: Of each of them, engines of which it is told why.
_COPIES: Final = 2
#: What a condition says of each; all of it is in `copyStates`.
_MESSAGE_LIMIT: Final = 200
#: A longer argument of the engine's command line, such as a chat template, is reported by its beginning.
_WORD: Final = 256


class ConditionStatus(NamedTuple):
    """One condition, without what all conditions have."""

    status: str
    reason: str
    message: str


@dataclass(frozen=True)
class ObservedWorkload:
    """What came of one workload.

    Attributes:
        rollout: how far its Deployment has got.
        trouble: why its pods do not serve.
        reported: what its engine reports, where it has.
        silent: a pod is ready, and its engine has not reported.
        engines: of the model, by pod, where several processes compute.
        older: Secrets and ConfigMaps of which pods run with an earlier state.
    """

    rollout: Rollout
    trouble: Diagnosis | None = None
    reported: Reported | None = None
    silent: bool = False
    engines: Mapping[str, EngineStates] = field(default_factory=dict)
    older: tuple[OlderObject, ...] = ()


@dataclass(frozen=True)
class Observed:
    """What came of a decision.

    Attributes:
        live: the objects that have the names of the endpoint's.
        refusal: what the API server said of one that it would not take.
        workloads: those whose Deployment there is, by name.
        route: whether the gateway serves the endpoint, where there is something to say.
    """

    live: Mapping[Child, Object]
    refusal: str = ""
    workloads: Mapping[str, ObservedWorkload] = field(default_factory=dict)
    route: Route | None = None

    @property
    def rollout(self) -> Rollout | None:
        """How far the pods that answer requests have got."""
        main = self.workloads.get(MAIN)
        return main.rollout if main else None

    @property
    def complete(self) -> bool:
        """Whether every pod of every workload serves from the newest spec."""
        return MAIN in self.workloads and self.unfinished is None

    @property
    def unfinished(self) -> Rollout | None:
        """A rollout that goes on."""
        return next((each.rollout for each in self.workloads.values() if not each.rollout.complete), None)

    @property
    def placed(self) -> bool:
        """Whether every workload has rolled out, be it that pods have ceased to serve since."""
        return all(each.rollout.complete or each.rollout.placed for each in self.workloads.values())

    @property
    def trouble(self) -> Diagnosis | None:
        """Why pods do not serve."""
        return next((each.trouble for each in self.workloads.values() if each.trouble), None)


def status(endpoint: Endpoint, decision: Decision, seen: Observed, now: datetime) -> dict[str, Any]:
    """The status to report."""
    rollout = seen.rollout or _NONE
    trouble = _trouble(decision, seen)
    ready = _ready(decision, seen, trouble)
    verdicts = {
        "Accepted": _accepted(decision),
        "Planned": _planned(decision),
        "Available": _available(rollout),
        "Progressing": _progressing(decision, seen, trouble),
        "Stalled": _stalled(trouble),
        **_routed(decision, seen),
        **_degraded(seen),
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
    return reported | _where(decision, seen) | _workloads(endpoint, decision, seen)


def failed(endpoint: Endpoint, problem: str, now: datetime) -> dict[str, Any]:
    """The status of an endpoint that the operator itself fails to reconcile: what was reported of it, with `problem`.

    Whether pods serve is not known to have changed, so Ready keeps what it says of the same spec.
    """
    conditions = {each["type"]: each for each in endpoint.status.get("conditions", ())}
    verdict = ConditionStatus("True", "ReconcileError", problem)
    verdicts = {"Stalled": verdict}
    if conditions.get("Ready", {}).get("observedGeneration") != endpoint.generation:
        verdicts["Ready"] = verdict._replace(status="False")
    changed = {each["type"]: each for each in _conditions(endpoint, verdicts, now)}
    kept = {kind: each for kind, each in conditions.items() if kind != "Ready" or kind not in changed}
    return {
        **endpoint.status,
        "observedGeneration": endpoint.generation,
        "conditions": list((kept | changed).values()),
    }


def _where(decision: Decision, seen: Observed) -> dict[str, Any]:
    """Where clients reach the endpoint."""
    parsed, service = decision.evaluation.parsed, _service(decision, seen)
    gateway = _gateway(decision, seen)
    routed = [{"name": "gateway", "url": f"{gateway.url}/v1"}] if gateway else []
    if service is None:
        return {}
    if parsed is None:
        return {"addresses": routed} if routed else {}
    internal = url(decision.owner, parsed.spec)
    addresses = [{"name": "cluster", "url": internal}]
    scheme, _, after_scheme = internal.partition("://")
    port = after_scheme.partition("/")[0].rpartition(":")[2]
    balancer: Any = (service.get("status") or {}).get("loadBalancer") or {}
    for ingress in balancer.get("ingress") or ():
        host = ingress.get("hostname") or ingress.get("ip")
        if host:
            host = f"[{host}]" if ":" in host else host
            name = "loadBalancer" if len(addresses) == 1 else f"loadBalancer-{len(addresses)}"
            addresses.append({"name": name, "url": f"{scheme}://{host}:{port}/v1"})
    return {"url": internal, "addresses": addresses[: _ADDRESSES - len(routed)] + routed}


def _service(decision: Decision, seen: Observed) -> Object | None:
    """The endpoint's own Service."""
    service = seen.live.get(Child("Service"))
    return service if service is not None and is_ours(decision.owner, service) else None


def _gateway(decision: Decision, seen: Observed) -> GatewaySettings | None:
    """The gateway that serves the endpoint: it finds the pods by the endpoint's own Service."""
    return seen.route.gateway if seen.route and _service(decision, seen) is not None else None


def _routed(decision: Decision, seen: Observed) -> dict[str, ConditionStatus]:
    route = seen.route
    if route is None:
        return {}
    if route.gateway and _gateway(decision, seen) is None:
        return {
            "Routed": ConditionStatus("False", "NoService", "the endpoint has no Service of its own; Ready says why")
        }
    return {"Routed": ConditionStatus("True" if route.gateway else "False", route.reason, route.message)}


def _workloads(endpoint: Endpoint, decision: Decision, seen: Observed) -> dict[str, Any]:
    """What runs. Where the spec is refused that is what the one before was made to."""
    evaluation = decision.evaluation
    if not decision.pinned or evaluation.plan is None or evaluation.parsed is None:
        before = endpoint.status.get("workloads")
        return {"workloads": before} if before else {}
    runtime = evaluation.parsed.spec.engine.runtime
    reported = []
    for name, pinned in decision.pinned.items():
        engine_status: dict[str, Any] = {"args": reported_args(engine(pinned.deployment))}
        found = seen.workloads[name].reported if name in seen.workloads else None
        if found is not None:
            facts = {"kvBlocks": found.kv_blocks, "kvCacheDtype": found.kv_cache_dtype, "weights": found.weights}
            engine_status |= {field: value for field, value in facts.items() if value != ""}
        if name in seen.workloads:
            engine_status |= _engines(seen.workloads[name].engines)
        earlier = reported_workload(endpoint, name)
        # Where other pods run than would be made today, the numbers are theirs.
        numbers = earlier["plan"] if pinned.differs and earlier else _plan(evaluation.plan)
        reported.append(
            {
                "name": name,
                "runtime": runtime,
                "image": image(pinned.deployment),
                "plan": numbers,
                "engine": engine_status,
            }
        )
    return {"workloads": reported}


def _engines(pods: Mapping[str, EngineStates]) -> dict[str, Any]:
    """Which engines serve; those that do not are listed first."""
    every = [(pod, engine) for pod, states in sorted(pods.items()) for engine in states.engines]
    if not every:
        return {}
    listed = [
        {
            "pod": pod,
            "number": engine.number,
            "serves": engine.serves,
            "ranks": engine.ranks,
            **({"missingRanks": list(engine.missing_ranks)} if engine.missing_ranks else {}),
            **({"message": engine.message} if engine.message and not engine.serves else {}),
            **({} if engine.kv_blocks is None else {"kvBlocks": engine.kv_blocks}),
            **({} if engine.kv_tokens is None else {"kvTokens": engine.kv_tokens}),
        }
        for pod, engine in sorted(every, key=lambda one: one[1].serves)
    ]
    serving = sum(engine.serves for _, engine in every)
    return {"copies": len(every), "servingCopies": serving, "copyStates": listed[:MAX_ENGINE_STATES]}


def reported_workload(endpoint: Endpoint, name: str) -> Mapping[str, Any] | None:
    """What was reported of a workload last."""
    return next((each for each in endpoint.status.get("workloads") or () if each["name"] == name), None)


def _plan(plan: Plan) -> dict[str, int]:
    placement, estimate = plan.placement, plan.estimate
    numbers: dict[str, int | None] = {
        "tensor": placement.tensor,
        "pipeline": placement.pipeline,
        "data": placement.data,
        "expert": placement.tensor * placement.data if placement.expert else None,
        "nodes": placement.nodes,
        "idle": placement.idle,
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


def reported_args(container: Mapping[str, Any]) -> list[str]:
    """The engine's command line, as it is reported."""
    return [word if len(word) <= _WORD else f"{word[:_WORD]}…" for word in container.get("args", ())]


def _trouble(decision: Decision, seen: Observed) -> Diagnosis | None:
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
    if evaluation.plan is None:
        return ConditionStatus("Unknown", "NotAccepted", "only an accepted spec is planned")
    placement = evaluation.plan.placement
    pipeline = f", pipeline {placement.pipeline}" if placement.pipeline > 1 else ""
    spread = f"each pod runs tensor {placement.tensor}{pipeline}, data {placement.data}"
    if placement.expert:
        spread += f", expert {placement.tensor * placement.data}"
    if evaluation.plan.chosen_by:
        unknown = evaluation.plan.estimate is None
        why = "takes all accelerators for tensor, since the model is not known" if unknown else "chose"
        spread += f", as {evaluation.plan.chosen_by} Auto {why}"
    spread = "; ".join((spread, *evaluation.plan.warnings))
    if decision.held:
        return ConditionStatus("Unknown", "ModelUnknown", f"{spread}; {_HELD}")
    if evaluation.plan.estimate is None:
        return ConditionStatus(
            "Unknown",
            "ModelUnknown",
            f"{spread}; whether the model fits is judged by the engine at its start: {evaluation.plan.unknown}",
        )
    return ConditionStatus("True", "Planned", spread)


def _available(rollout: Rollout) -> ConditionStatus:
    if rollout.available:
        return ConditionStatus("True", "Available", f"{rollout.available} of {rollout.desired} pods serve")
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
        return ConditionStatus("True", "RollingOut", _progress(seen.unfinished or _NONE))
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
    more = f"; and so in {len(down) - _PODS} more pods" if len(down) > _PODS else ""
    remedy = "the others of its pod serve; one that does not come back says why in the pod's log"
    return {"Degraded": ConditionStatus("True", "CopyDown", f"{'; '.join(down[:_PODS])}{more}; {remedy}")}


def _reported_text(states: EngineStates) -> str:
    """What a pod says of its engines that do not serve."""
    texts = [
        f"engine {engine.number}{_lacks(engine)}{f': {engine.message[:_MESSAGE_LIMIT]}' if engine.message else ''}"
        for engine in states.down
    ]
    more = f"; and {len(texts) - _COPIES} more" if len(texts) > _COPIES else ""
    return "; ".join(texts[:_COPIES]) + more


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
            return ConditionStatus("True", "ScaledToZero", "spec.replicas is 0")
        serving = f"{rollout.available} of {rollout.desired} pods serve the newest spec"
        return ConditionStatus("True", "Ready", "; ".join((serving, *older_objects(decision, seen))))
    if trouble:
        return ConditionStatus("False", trouble.reason, trouble.message)
    if decision.held:
        return ConditionStatus("False", "RollingOut", _HELD)
    if rollout is None:
        return ConditionStatus("False", "RollingOut", "the Deployment does not exist yet")
    return ConditionStatus("False", "RollingOut", _progress(seen.unfinished or rollout) + _waited_for(seen))


def older_objects(decision: Decision, seen: Observed) -> list[str]:
    """What is said of Secrets and ConfigMaps of which pods run with an earlier state: one sentence each, and what
    renews them."""
    owner, sentences = decision.owner, []
    for name, workload in seen.workloads.items():
        restart = f"kubectl rollout restart deployment/{owner.of(name).object_name} --namespace {owner.namespace}"
        for each in workload.older:
            subject = f"{each.kind} {each.name} ({each.field}) as it was before {each.changed:%Y-%m-%dT%H:%M:%SZ}"
            sentences.append(f"{_named(each.pods)} with {subject}: {restart} renews them")
    return sentences


def _named(pods: tuple[str, ...]) -> str:
    more = f" and {len(pods) - _PODS} more" if len(pods) > _PODS else ""
    return f"pod{'s' if len(pods) > 1 else ''} {', '.join(pods[:_PODS])}{more} run{'' if len(pods) > 1 else 's'}"


def _progress(rollout: Rollout) -> str:
    serving = min(rollout.updated, rollout.available, rollout.desired)
    leaving = rollout.total - rollout.desired
    return f"{serving} of {rollout.desired} pods serve the newest spec" + (f"; {leaving} to go" if leaving > 0 else "")


def _conditions(endpoint: Endpoint, verdicts: Mapping[str, ConditionStatus], now: datetime) -> list[dict[str, Any]]:
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
