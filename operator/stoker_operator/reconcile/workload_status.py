"""`status.workloads`: images, arguments, plans and engines of an endpoint. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from stoker_operator.api.v1alpha1.status import MAX_ENGINE_STATES
from stoker_operator.objects.facts import Endpoint, EngineStates
from stoker_operator.plan.planner import Plan
from stoker_operator.reconcile.decide import Decision
from stoker_operator.reconcile.observed import Observed
from stoker_operator.reconcile.pinning import engine, image, placement_numbers

#: Maximum reported length of one engine argument, in characters; a longer one, such as a chat template, is truncated.
_WORD: Final = 256


def workloads_status(endpoint: Endpoint, decision: Decision, seen: Observed) -> dict[str, Any]:
    """Return `status.workloads`, which is unchanged if the decision pins no pods."""
    evaluation = decision.evaluation
    if not decision.pinned:
        before = endpoint.status.get("workloads")
        return {"workloads": before} if before else {}
    reported = []
    for workload in evaluation.workloads:
        name, pinned = workload.name, decision.pinned[workload.name]
        engine_status: dict[str, Any] = {"args": reported_args(engine(pinned.template))}
        found = seen.workloads[name].reported if name in seen.workloads else None
        if found is not None:
            facts = {"kvBlocks": found.kv_blocks, "kvCacheDtype": found.kv_cache_dtype, "weights": found.weights}
            engine_status |= {field: value for field, value in facts.items() if value != ""}
        if name in seen.workloads:
            engine_status |= _engines(seen.workloads[name].engines)
        earlier = reported_workload(endpoint, name)
        # If the running pods differ from those that would be created today, report the running pods' plan.
        today = _plan(evaluation.plans[name])
        numbers = ((earlier or {}).get("plan") or dict(pinned.plan) or today) if pinned.differs else today
        reported.append(
            {
                "name": name,
                "runtime": workload.spec.engine.runtime,
                "image": image(pinned.template),
                "plan": numbers,
                "engine": engine_status,
            }
        )
    return {"workloads": reported}


def _engines(pods: Mapping[str, EngineStates]) -> dict[str, Any]:
    """Return the states of the engines; those that do not accept requests come first."""
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
    """Return the last reported status of a workload, or None."""
    return next((each for each in endpoint.status.get("workloads") or () if each["name"] == name), None)


def _plan(plan: Plan) -> dict[str, int]:
    estimate = plan.estimate
    numbers: dict[str, int | None] = {**placement_numbers(plan.placement), "maxModelLen": plan.max_model_len}
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
    """Return the engine's command line with long arguments truncated."""
    return [word if len(word) <= _WORD else f"{word[:_WORD]}…" for word in container.get("args", ())]
