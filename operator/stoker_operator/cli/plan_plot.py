"""``stoker plan --plot``: how each placement uses an accelerator's memory, as stacked bars."""

from __future__ import annotations

from stoker_common.bar_chart import Bar, BarChart
from stoker_engine.sizing.memory import GIB
from stoker_operator.cli.plan_answer import PlanReport, judged
from stoker_operator.plan.estimate import Estimate, gib
from stoker_operator.plan.options import Option
from stoker_operator.plan.planner import Study


def memory_lines(answer: PlanReport, chart: BarChart) -> list[str]:
    """Return the chart, or one line that states why there is none."""
    ways = [(way, way.estimate, verdict) for way, verdict, _ in judged(answer)]
    assert answer.study is not None
    usable = next((found.usable_bytes_per_gpu for _, found, _ in ways if found and found.usable_bytes_per_gpu), None)
    if usable is None:
        return [f"nothing to plot: {_obstacle(answer.study)}"]
    with_adapters = any(found and found.adapters for _, found, _ in ways)
    bars = []
    for way, found, verdict in ways:
        sizes = _parts(found, with_adapters) if found else ()
        texts = [" + ".join(f"{size / GIB:,.1f}" for size in sizes)] if sizes else []
        bars.append(Bar(_label(way), sizes, "  ".join([*texts, verdict])))
    names = ["weights", "activations", "reserve", "KV cache", *(["adapters"] if with_adapters else [])]
    return [
        f"memory of {_device(answer.study)} in GiB; {chart.limit_mark} marks the {gib(usable)} that the engine may use",
        chart.legend(names),
        *chart.stacked(bars, usable),
    ]


def _parts(found: Estimate, with_adapters: bool) -> tuple[float, ...]:
    fixed = (found.weight_bytes_per_gpu, found.activation_bytes_per_gpu, found.reserved_bytes_per_gpu)
    return (*fixed, found.kv_bytes_per_gpu or 0, *((found.adapter_bytes_per_gpu,) if with_adapters else ()))


def _device(study: Study) -> str:
    if study.placement.accelerator.resource is not None:
        return "an accelerator"
    return "a rank" if study.placement.sizes.used > 1 else "the container"


def _label(way: Option) -> str:
    sizes = way.sizes
    pipeline = f" PP {sizes.pipeline}" if sizes.pipeline > 1 else ""
    expert = f" EP {way.expert}" if way.expert > 1 else ""
    return f"TP {sizes.tensor}{pipeline} DP {sizes.data}{expert}"


def _obstacle(study: Study) -> str:
    if study.unknown:
        return study.unknown
    if study.placement.accelerator.memory_mib is None:
        return "the memory is not known; set spec.hardware.resources.limits.memory, or --memory with --model"
    return "no placement has an estimate"
