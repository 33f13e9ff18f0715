"""nano-vllm's benchmark with the small model, with and without asynchronous scheduling; and the GPU's busy time."""

from __future__ import annotations

from typing import Any

from gpu_parts.busy import BusyTime
from gpu_parts.context import Context
from gpu_parts.engines import TimedEngine
from gpu_parts.figures import Figure
from gpu_parts.models import Size
from gpu_parts.requests import equal, lengths, nano_vllm

#: Steps before those that are recorded, and recorded steps.
_SETTLED, _RECORDED = 8, 24
#: Limits of a step; the benchmark's source has vLLM's defaults of 512 sequences and 16,384 tokens.
_LIMITS = {"max_num_seqs": 512, "max_num_batched_tokens": 16384}


def measure(context: Context, is_async: bool) -> None:
    """Record the figures of one kind of scheduling."""
    scale, name = context.scale, context.scale.small
    limits: dict[str, Any] = {} if scale.device == "cpu" else _LIMITS
    engine = TimedEngine(context, name, async_scheduling=is_async, **limits)
    size, (count, longest) = Size(name), scale.nano
    requests = nano_vllm(count, longest)
    engine.generate(equal(2, 8, 4), temperature=0.6)
    took = engine.generate(requests, temperature=0.6)
    outputs = sum(out for _, out in requests)
    read, flops = size.of_requests(lengths(requests), max(out for _, out in requests))
    settings = f"{count} requests, {engine.num_steps:,} steps, temperature 0.6; {engine.settings}"
    kind = "async" if is_async else "sync"
    title = f"{name}, nano-vllm's benchmark, {'asynchronous' if is_async else 'synchronous'} scheduling, output"
    key = f"nano-vllm/{name}/bf16/{kind}"
    context.add(Figure(key, title, outputs / took, "tok/s", settings, read, flops, amount=outputs))
    if is_async:
        _busy(context, engine)


def _busy(context: Context, engine: TimedEngine) -> None:
    """Record the share of a step's time in which the device computes."""
    streams, length = context.scale.busy_streams, context.scale.context
    output = max(context.scale.tokens, 2 * (_SETTLED + _RECORDED)) if context.scale.device == "cuda" else 48
    requests = equal(streams, length, output)
    engine.generate(requests)
    alone = engine.step_ms(streams)
    with BusyTime(context.device, streams, _SETTLED, _RECORDED) as busy:
        engine.on_step = busy.step
        engine.generate(requests)
        engine.on_step = lambda count: None
    name = context.scale.small
    settings = (
        f"kernels and copies {busy.ms_per_step:.2f} ms a step by torch's profiler, over {_RECORDED} steps; a step "
        f"without profiler {alone:.2f} ms; {length} + {output} tokens; {engine.settings}"
    )
    title = f"{name}, device busy in decodes of {streams} streams"
    context.add(Figure(f"busy/{name}/{streams}", title, 100 * busy.ms_per_step / alone, "%", settings))
