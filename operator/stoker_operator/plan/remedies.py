"""Remedies for layouts that are not possible or miss the target."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from stoker_common.errors import ModelError
from stoker_engine.sizing.batch_limits import default_batch_limits
from stoker_engine.sizing.memory import GIB
from stoker_engine.sizing.planned_formats import on_load_formats
from stoker_engine.sizing.quantized_weights import usual_weights
from stoker_operator.api.v1alpha1 import Spec
from stoker_operator.api.v1alpha1.hardware import CPU
from stoker_operator.api.v1alpha1.parallelism import Sizes
from stoker_operator.plan.catalogue import Catalogue
from stoker_operator.plan.estimate import could_hold, needed_bytes
from stoker_operator.plan.options import Advice, Option, ParallelLayout, options, recommended, smallest
from stoker_operator.plan.proposals import Proposal, Refusal
from stoker_operator.plan.support import can_quantize

#: Limits of a step, in tokens and sequences, with which an engine on a CPU needs little memory and is still useful.
_SMALL_STEP: Final = 256
_FEW_SEQUENCES: Final = 16


def refusal(
    spec: Spec,
    catalogue: Catalogue,
    layout: ParallelLayout,
    chosen: Option,
    ways: Sequence[Option],
    advice: Advice | None,
) -> Refusal:
    """Return the refusal of the `chosen` layout, with its proposals.

    Args:
        layout: inputs that all layouts share.
        chosen: the layout in use, which has a problem.
        ways: the evaluated layouts.
        advice: the recommended layout; None if there is none.
    """
    problem = chosen.problem
    assert problem is not None
    on_cpu = spec.hardware.accelerator == CPU
    field, otherwise = "spec.parallelism", "use accelerators with more memory"
    if problem.reason == "ExpertsNotShared":
        field, otherwise = (
            "spec.parallelism.expert",
            "use other sizes in spec.parallelism, or accelerators with more memory",
        )
    elif problem.reason == "NotTogether":
        field = "spec.hardware.count"
    elif problem.reason == "MaxModelLenDoesNotFit":
        field = "spec.engine.maxModelLen"
    elif advice is None and problem.reason == "DoesNotFit":
        field = "spec.hardware.resources.limits.memory" if on_cpu else "spec.hardware"
    if on_cpu and problem.reason != "ExpertsNotShared":
        otherwise = "raise spec.hardware.resources.limits.memory, or use a smaller model"

    def proposals() -> Iterator[Proposal]:
        if problem.reason == "ExpertsNotShared":
            yield from _one_copy(spec, chosen.sizes)
            return
        if problem.reason == "MaxModelLenDoesNotFit" and problem.length:
            yield Proposal(f"lower it to {problem.length}", {"engine": {"maxModelLen": problem.length}})
        if advice is not None:
            yield from (replace(each, change=None) for each in possible_ways(ways, advice))  # evaluated already
        elif _sized_by_hand(layout):
            yield Proposal("give the KV cache more memory in spec.engine.args")
        elif on_cpu and chosen.estimate is None:
            yield Proposal("remove it, and use spec.replicas for more engines", {"parallelism": None})
        elif on_cpu:
            yield from _more_memory(spec, layout, chosen)
        else:
            yield from tuple(_smaller_pods(layout)) or _other_machines(spec, layout)
            yield from _fewer_bits(spec, catalogue, layout)
            yield from _fewer_adapters(spec, layout)
            yield from _shorter_steps(layout)

    return Refusal(field, problem.message, problem.reason, proposals, otherwise, "; or ")


def shortfalls(spec: Spec, layout: ParallelLayout, chosen: Option, advice: Advice | None) -> Iterator[str]:
    """Yield a warning if a possible layout misses the target: the length is limited, or too few sequences run at once.

    Args:
        layout: inputs that all layouts share.
        chosen: the layout in use.
        advice: the recommended layout; None if there is none.
    """
    found, bench = chosen.estimate, layout.bench
    if chosen.problem or found is None or bench is None or chosen.serves:
        return
    assert found.max_model_len is not None and found.max_concurrency is not None
    length, wanted_len, at_once = found.max_model_len, bench.wanted_len, found.max_concurrency
    parts = []
    if length < wanted_len:
        parts.append(f"sequences are limited to {length:,} of the model's {wanted_len:,} tokens, to fit in memory")
    if at_once < layout.min_concurrency:
        parts.append(f"an engine holds {at_once} of {layout.min_concurrency} sequences of {length:,} tokens at once")
    yield f"{', and '.join(parts)}; {_more_room(spec, layout, chosen, advice)}"


def apart(advice: Advice) -> str:
    """Return the warning that engines that share a pod are better placed in separate pods."""
    return (
        f"engines that share a pod are rescheduled together; hardware.count {advice.count} with replicas "
        f"{advice.replicas} gives each engine its own pod"
    )


def option_text(option: Option) -> str:
    """Format a layout with the names of the spec's fields: ``tensor 4, data 2``."""
    sizes = option.sizes
    pipeline = f", pipeline {sizes.pipeline}" if sizes.pipeline > 1 else ""
    expert = f", expert {option.expert}" if option.expert > 1 else ""
    return f"tensor {sizes.tensor}{pipeline}, data {sizes.data}{expert}"


def shared_by(sizes: Sizes, expert: int = 1, count: int | None = None) -> dict[str, Any]:
    """Return the fields of a spec that state a layout, and with `count` the accelerators of its single pod."""
    stated = {**sizes._asdict(), "expert": expert if expert > 1 else None, "mode": None}
    hardware = {} if count is None else {"hardware": {"count": count, "nodes": None}}
    return {**hardware, "parallelism": stated}


def possible_ways(ways: Sequence[Option], advice: Advice) -> Iterator[Proposal]:
    """Propose the layouts that are possible, the recommended one first."""
    best = advice.option
    alternatives = [option for option in ways if option.problem is None and option is not best]
    better = f"; better as hardware.count {advice.count}, replicas {advice.replicas}" if advice.apart else ""
    for option in (best, *alternatives):
        words = option_text(option) + (f" (recommended{better})" if option is best else "")
        yield Proposal(f"use {words}", shared_by(option.sizes, option.expert), also=words)


def _one_copy(spec: Spec, sizes: Sizes) -> Iterator[Proposal]:
    """Propose whole experts in pods of one engine, or split experts."""
    alone = sizes._replace(data=1)
    is_counted = spec.hardware.accelerator != CPU
    count = f"hardware.count {alone.used}, " if is_counted and spec.hardware.gpus != alone.used else ""
    if alone.tensor > 1:
        change = shared_by(alone, alone.tensor, alone.used if is_counted else None)
        yield Proposal(f"use {count}data 1 with expert {alone.tensor}, and replicas for more engines", change)
    yield Proposal("remove it", {"parallelism": {"expert": None}})


def _more_room(spec: Spec, layout: ParallelLayout, chosen: Option, advice: Advice | None) -> str:
    """Return the remedy for a layout that misses the target."""
    if spec.hardware.accelerator == CPU:
        return "raise spec.hardware.resources.limits.memory, or set spec.engine.maxModelLen to the required length"
    if advice is not None and advice.option.way != chosen.way and advice.option.serves:
        return f"use {option_text(advice.option)}, or set spec.engine.maxModelLen to the required length"
    wider = smallest(layout, serving=True)
    if wider is not None and wider.copy_size > layout.count:
        return f"use {wider.copy_size} × {spec.hardware.accelerator} per engine, or set spec.engine.maxModelLen"
    return "set spec.engine.maxModelLen to the required length"


def _smaller_pods(layout: ParallelLayout) -> Iterator[Proposal]:
    """Propose the next smaller number of accelerators per pod with which the model can run."""
    if not layout.divisible:
        return
    for count in range(layout.count - 1, 0, -1):
        if layout.bench is not None and not could_hold(layout.bench, count):
            return
        fewer = replace(layout, count=count, nodes=1)
        best = recommended(options(fewer))
        if best is not None or (layout.bench is None and count == layout.max_per_pod):
            best = best or Option(Sizes(count, 1, 1))
            change = shared_by(best.sizes, best.expert, count)
            yield Proposal(f"use hardware.count {count} with {option_text(best)}, and more replicas", change)
            return


def _sized_by_hand(layout: ParallelLayout) -> bool:
    numbers = layout.bench.numbers if layout.bench else None
    return numbers is not None and (numbers.kv_cache_memory_bytes is not None or numbers.num_blocks is not None)


def _more_memory(spec: Spec, layout: ParallelLayout, chosen: Option) -> Iterator[Proposal]:
    if layout.bench is None:
        return
    needed = -(-layout.gpus * needed_bytes(layout.bench, layout.sharding(chosen.sizes)) // GIB)
    memory = {"hardware": {"resources": {"limits": {"memory": f"{needed}Gi"}}}}
    yield Proposal(f"set spec.hardware.resources.limits.memory to {needed}Gi or more", memory)
    least = {"maxNumBatchedTokens": _SMALL_STEP, "maxNumSeqs": _FEW_SEQUENCES}
    yield Proposal("lower spec.engine.maxNumBatchedTokens or maxNumSeqs", {"engine": least})
    yield from _fewer_adapters(spec, layout)
    if layout.bench.numbers.element_bytes > 2:
        yield Proposal("set spec.engine.dtype to bfloat16", {"engine": {"dtype": "bfloat16"}})


def _shorter_steps(layout: ParallelLayout) -> Iterator[Proposal]:
    """Propose the smaller GPUs' default limits of a step, with which activations take less memory."""
    least = default_batch_limits(0, "", on_cpu=False, unbounded_prompts=False)
    tokens, sequences = least.max_num_batched_tokens, least.max_num_seqs
    if layout.bench is not None and layout.bench.settings.max_num_batched_tokens > tokens:
        sequences = min(sequences, layout.bench.settings.max_num_seqs)
        change = {"maxNumBatchedTokens": tokens, "maxNumSeqs": sequences}
        yield Proposal(
            f"set spec.engine.maxNumBatchedTokens to {tokens} and maxNumSeqs to {sequences}", {"engine": change}
        )


def _fewer_adapters(spec: Spec, layout: ParallelLayout) -> Iterator[Proposal]:
    """Propose smaller limits for adapters. The proposal is planned with a single adapter of rank 1."""
    if layout.bench is not None and layout.bench.numbers.adapters is not None:
        least = {"args": [*(spec.engine.args or []), "--max-loras=1", "--max-cpu-loras=1", "--max-lora-rank=1"]}
        yield Proposal("lower --max-loras, --max-cpu-loras or --max-lora-rank in spec.engine.args", {"engine": least})


def _other_machines(spec: Spec, layout: ParallelLayout) -> Iterator[Proposal]:
    found = smallest(layout)
    if found is None or found.copy_size <= layout.gpus:
        yield Proposal("use accelerators with more memory")
        return
    sizes = found.sizes
    pipeline = f" × pipeline {sizes.pipeline}" if sizes.pipeline > 1 else ""
    expert = f", expert {found.expert}" if found.expert > 1 else ""
    yield Proposal(
        f"use at least {found.copy_size} × {spec.hardware.accelerator} with tensor {sizes.tensor}{pipeline}{expert}",
        shared_by(sizes, found.expert, found.copy_size),
    )


def _fewer_bits(spec: Spec, catalogue: Catalogue, layout: ParallelLayout) -> Iterator[Proposal]:
    """Propose fp8 weights if they fit on the same accelerators, with another runtime if this one does not support
    fp8."""
    bench = layout.bench
    if bench is None or bench.shape.method or bench.shape.is_gguf or spec.engine.quantization:
        return  # quantized weights are not quantized again
    key, runtime = spec.hardware.accelerator, spec.engine.runtime
    runtimes = [each for each in (runtime, *sorted(catalogue.runtimes)) if can_quantize(catalogue, each, key, "fp8")]
    if not runtimes:
        return
    if runtimes[0] == "stoker":
        try:
            formats = on_load_formats(bench.shape.config, "fp8", bench.on_cpu)
        except ModelError:
            return  # the config contains an implausible number of experts
        smaller = replace(bench, numbers=replace(bench.numbers, quantized=None, formats=formats))
    else:
        smaller = replace(bench, numbers=replace(bench.numbers, quantized=usual_weights("fp8")))
    best = recommended(options(replace(layout, bench=smaller))) if could_hold(smaller, layout.gpus) else None
    if best is None:
        return
    words = "set spec.engine.quantization to fp8"
    engine: dict[str, Any] = {"quantization": "fp8"}
    if runtimes[0] != runtime:
        words += f" with spec.engine.runtime {runtimes[0]}"
        engine |= {"runtime": runtimes[0], "image": None}
    change = {**shared_by(best.sizes, best.expert), "engine": engine}
    yield Proposal(f"{words}, which fits with {option_text(best)}", change)
