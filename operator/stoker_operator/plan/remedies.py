"""What to write instead of sizes that cannot be: the ways there are, or the machine that would do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stoker_engine.contract.memory import GIB
from stoker_engine.contract.quantized_weights import usual_weights
from stoker_operator.api.v1alpha1 import Spec
from stoker_operator.api.v1alpha1.hardware import CPU
from stoker_operator.api.v1alpha1.parallelism import Sizes
from stoker_operator.api.violation import Violation
from stoker_operator.plan.catalogue import Catalogue
from stoker_operator.plan.estimate import could_hold, needed_bytes
from stoker_operator.plan.options import Layout, Option, options, recommended, smallest
from stoker_operator.plan.support import can_quantize


def violation(spec: Spec, catalogue: Catalogue, layout: Layout, chosen: Option, ways: Sequence[Option]) -> Violation:
    """What is wrong with the `chosen` way, and every way out.

    Args:
        spec: what is asked for.
        catalogue: what the runtimes can do.
        layout: what the ways share.
        chosen: the way that is asked for, which has a problem.
        ways: all ways.
    """
    problem = chosen.problem
    assert problem is not None
    best = recommended(ways)
    on_cpu = spec.hardware.accelerator == CPU
    remedies = []
    field = "spec.parallelism"
    if problem.reason == "MaxModelLenDoesNotFit":
        field = "spec.engine.maxModelLen"
        remedies.append(f"lower it to {problem.length}")
    elif best is None and problem.reason == "DoesNotFit":
        field = "spec.hardware.resources.limits.memory" if on_cpu else "spec.hardware"
    if best is not None:
        remedies.append(_ways(ways, best))
    elif _sized_by_hand(layout):
        remedies.append("give the cache more in spec.engine.args")
    elif on_cpu:
        remedies += _more_memory(layout)
    else:
        remedies += _other_machines(spec, layout)
        remedies += _fewer_bits(spec, catalogue, layout)
    return Violation(field, problem.message, "; or ".join(remedies), reason=problem.reason)


def say(sizes: Sizes) -> str:
    """The sizes as the spec's fields say them."""
    pipeline = f", pipeline {sizes.pipeline}" if sizes.pipeline > 1 else ""
    return f"tensor {sizes.tensor}{pipeline}, data {sizes.data}"


def _ways(ways: Sequence[Option], best: Option) -> str:
    others = [option for option in ways if option.problem is None and option is not best]
    text = f"use {say(best.sizes)} (recommended)"
    return text + "".join(f" or {say(option.sizes)}" for option in others)


def _sized_by_hand(layout: Layout) -> bool:
    numbers = layout.bench.numbers if layout.bench else None
    return numbers is not None and (numbers.kv_cache_memory_bytes is not None or numbers.num_blocks is not None)


def _more_memory(layout: Layout) -> list[str]:
    if layout.bench is None:
        return []
    needed = -(-needed_bytes(layout.bench) // GIB)
    return [
        f"set spec.hardware.resources.limits.memory to {needed}Gi or more",
        "lower spec.engine.maxNumBatchedTokens or maxNumSeqs",
        *(["set spec.engine.dtype to bfloat16"] if layout.bench.numbers.element_bytes > 2 else []),
    ]


def _other_machines(spec: Spec, layout: Layout) -> list[str]:
    found = smallest(layout)
    if found is None or found.copy_size <= layout.gpus:
        return ["use accelerators with more memory"]
    sizes = found.sizes
    pipeline = f" × pipeline {sizes.pipeline}" if sizes.pipeline > 1 else ""
    return [f"use at least {found.copy_size} × {spec.hardware.accelerator} with tensor {sizes.tensor}{pipeline}"]


def _fewer_bits(spec: Spec, catalogue: Catalogue, layout: Layout) -> list[str]:
    """fp8 weights, where they would fit on what is there; whichever runtime has them."""
    bench = layout.bench
    if bench is None or bench.numbers.quantized is not None:
        return []
    smaller = replace(bench, numbers=replace(bench.numbers, quantized=usual_weights("fp8")))
    if not could_hold(smaller, layout.gpus):
        return []
    best = recommended(options(replace(layout, bench=smaller)))
    key, runtime = spec.hardware.accelerator, spec.engine.runtime
    runtimes = [each for each in (runtime, *sorted(catalogue.runtimes)) if can_quantize(catalogue, each, key, "fp8")]
    if best is None or not runtimes:
        return []
    words = "set spec.engine.quantization to fp8"
    if runtimes[0] != runtime:
        words += f" with spec.engine.runtime {runtimes[0]}"
    return [f"{words}, which fits with {say(best.sizes)}"]
