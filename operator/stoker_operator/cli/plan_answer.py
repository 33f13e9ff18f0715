"""The output of ``stoker plan``: a document for programs, and a table for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stoker_operator.api.v1alpha1 import Spec
from stoker_operator.api.violation import Violation
from stoker_operator.cli import plan_cluster
from stoker_operator.cli.columns import columns
from stoker_operator.cli.plan_cluster import StockRow
from stoker_operator.plan.estimate import gib
from stoker_operator.plan.options import Advice, Option
from stoker_operator.plan.planner import Study


@dataclass(frozen=True)
class PlanReport:
    """The result of ``stoker plan``.

    Attributes:
        spec: the spec, with other sizes if the stated ones are refused; None if there is no single valid spec.
        study: the evaluated placements of `spec`, or None.
        has_stated_sizes: whether `study` is about the stated sizes, whose placement is then `study.chosen`.
        errors: the violations; empty if the request is possible.
        cluster: whether the nodes have room for a pod, or what could not be read from the cluster; None if there is
            nothing to state.
        kinds: the plan for each kind of accelerator in the cluster, or None if the cluster was not queried.
    """

    spec: Spec | None
    study: Study | None
    has_stated_sizes: bool
    errors: tuple[Violation, ...]
    cluster: str | None = None
    kinds: tuple[StockRow, ...] | None = None


def document(answer: PlanReport) -> dict[str, Any]:
    """Return the report for JSON and YAML. Unknown values are null."""
    study = answer.study
    found: dict[str, Any] = {
        "accepted": not answer.errors,
        "options": [
            {
                "tensor": way.sizes.tensor,
                "pipeline": way.sizes.pipeline,
                "data": way.sizes.data,
                **({"expert": way.expert} if way.expert > 1 else {}),
                **_numbers(way),
                **_of_adapters(way),
                "verdict": verdict,
                "reason": reason,
            }
            for way, verdict, reason in judged(answer)
        ],
        "recommendation": _recommendation(study.advice) if study and study.advice else None,
        "errors": [
            {"field": violation.field, "message": violation.message, "remedy": violation.remedy}
            for violation in answer.errors
        ],
        "warnings": list(study.warnings) if study else [],
    }
    if answer.cluster is not None:
        found["cluster"] = answer.cluster
    if answer.kinds is not None:
        found["accelerators"] = plan_cluster.document(answer.kinds)
    return found


def table(answer: PlanReport) -> str:
    """Return the report as text with tables; may be empty."""
    parts = [_ways(answer), *([_kinds(answer.kinds)] if answer.kinds else [])]
    return "\n\n".join(filter(None, parts))


def _kinds(kinds: Sequence[StockRow]) -> str:
    return "\n".join(columns(plan_cluster.table(kinds), ("accelerator", *_WORDS)))


def _ways(answer: PlanReport) -> str:
    spec, study = answer.spec, answer.study
    if spec is None or study is None:
        return "" if answer.cluster is None else f"{'cluster':<13}{answer.cluster}"
    placement = study.placement
    memory = placement.accelerator.memory_mib
    nodes = f" × {placement.nodes} nodes" if placement.nodes > 1 else ""
    ranks = placement.sizes.used if placement.accelerator.resource is None else 1
    head = [
        ("model", spec.model.source),
        ("accelerator", f"{placement.count}{nodes} × {spec.hardware.accelerator}" + _each(memory) + _shared(ranks)),
        ("runtime", spec.engine.runtime + (f", {study.image}" if study.image else "")),
    ]
    if study.unknown:
        head.append(("unknown", study.unknown))
    if answer.cluster is not None:
        head.append(("cluster", answer.cluster))
    found = study.chosen.estimate
    if found is not None and found.adapters is not None:
        head.append(("adapters", f"{gib(found.adapter_bytes_per_gpu)} ({found.adapters})"))
    if study.advice is not None:
        head.append(("recommended", _written(study.advice)))
    ways = judged(answer)
    dealt = any(way.expert > 1 for way, _, _ in ways)
    rows = [
        (
            *map(str, (way.sizes.tensor, way.sizes.pipeline, way.sizes.data)),
            *([str(way.expert)] if dealt else []),
            str(way.sizes.data),
            *_cells(way),
            verdict,
            reason,
        )
        for way, verdict, reason in ways
    ]
    titles = tuple(title for title in _TITLES if title != "EP" or dealt)
    lines = [f"{name:<13}{value}" for name, value in head]
    lines += ["", *columns([titles, *rows], _WORDS)]
    lines += ["", *(f"warning: {warning}" for warning in study.warnings)] if study.warnings else []
    return "\n".join(lines)


_TITLES = (
    "TP", "PP", "DP", "EP", "engines", "weights/GPU", "KV tokens/engine", "max length", "max concurrency", "verdict",
    "why",
)  # fmt: skip
#: Columns of text, which are left-aligned.
_WORDS = ("verdict", "why")


def judged(answer: PlanReport) -> list[tuple[Option, str, str]]:
    """Return each placement with its verdict and the reason, which may be empty."""
    study = answer.study
    if study is None:
        return []
    advice = study.advice
    ways = []
    for way in study.options:
        reason = advice.reason if advice is not None and way.way == advice.option.way else ""
        if way.problem is not None:
            ways.append((way, "impossible", way.problem.message))
        elif answer.has_stated_sizes and way.way == study.chosen.way:
            ways.append((way, "chosen", f"recommended: {reason}" if reason else ""))
        else:
            ways.append((way, "recommended" if reason else "possible", reason or _short(study, way)))
    return ways


def _short(study: Study, way: Option) -> str:
    """Describe whether a possible placement misses the requested length or concurrency; empty if it reaches both."""
    found = way.estimate
    if way.serves or found is None or found.max_model_len is None or found.max_concurrency is None:
        return ""
    if found.max_model_len < study.wanted_len:
        return f"sequences are limited to {found.max_model_len:,} of {study.wanted_len:,} tokens"
    return f"too few sequences of {study.wanted_len:,} tokens at once"


def _recommendation(advice: Advice) -> dict[str, Any]:
    """Return the recommendation as the fields of a spec."""
    sizes = advice.sizes
    parallelism = {"tensor": sizes.tensor, "pipeline": sizes.pipeline, "data": sizes.data}
    expert = {"expert": advice.option.expert} if advice.option.expert > 1 else {}
    return {
        "replicas": advice.replicas,
        "hardware": {"count": advice.count, "nodes": advice.nodes},
        "parallelism": {**parallelism, **expert},
        "reason": advice.reason,
    }


def _written(advice: Advice) -> str:
    """Return the recommendation as one line."""
    nodes = f", nodes {advice.nodes}" if advice.nodes > 1 else ""
    expert = f", expert {advice.option.expert}" if advice.option.expert > 1 else ""
    pipeline = f", pipeline {advice.sizes.pipeline}" if advice.sizes.pipeline > 1 else ""
    sizes = f"tensor {advice.sizes.tensor}{pipeline}, data {advice.sizes.data}{expert}"
    return f"count {advice.count}{nodes}, replicas {advice.replicas}, {sizes}"


def _numbers(way: Option) -> dict[str, int | None]:
    found = way.estimate
    return {
        "weightBytesPerGpu": found.weight_bytes_per_gpu if found else None,
        "kvTokensPerCopy": found.kv_tokens_per_copy if found else None,
        "maxModelLen": found.max_model_len if found else None,
        "maxConcurrency": found.max_concurrency if found else None,
    }


def _of_adapters(way: Option) -> dict[str, int]:
    found = way.estimate
    return {"adapterBytesPerGpu": found.adapter_bytes_per_gpu} if found and found.adapters else {}


def _cells(way: Option) -> tuple[str, ...]:
    weights, *counts = _numbers(way).values()
    return ("?" if weights is None else gib(weights), *("?" if each is None else f"{each:,}" for each in counts))


def _each(memory: int | None) -> str:
    return f" ({memory:,} MiB each)" if memory else ""


def _shared(ranks: int) -> str:
    return f", shared by {ranks} ranks" if ranks > 1 else ""
