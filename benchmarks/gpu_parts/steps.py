"""The big model: decodes of several streams, and prompts; in bfloat16 also ShareGPT-like requests."""

from __future__ import annotations

import statistics
from typing import Any

from gpu_parts.context import Context
from gpu_parts.engines import TimedEngine
from gpu_parts.figures import Arithmetic, Figure
from gpu_parts.models import Size
from gpu_parts.requests import equal, lengths, sharegpt_like

#: Times that each prompt is computed.
_PROMPT_RUNS = 5


def measure(context: Context, stored: str) -> None:
    """Record the figures of one format of weights."""
    scale, name = context.scale, context.scale.big
    size, length = Size(name), max(scale.prompts)
    # Whole prompts in one step; the steps of decodes do not depend on this limit.
    engine = TimedEngine(context, name, stored, max_num_batched_tokens=length, **_limits(context))
    title = f"{name} {stored}"
    context.add(Figure(f"load/{name}/{stored}", f"{title}, loading and warm-up", engine.loaded_s, "s", engine.settings))
    engine.generate(equal(2, scale.context, 4))  # warm-up
    for streams in scale.streams:
        engine.generate(equal(streams, scale.context, scale.tokens))
        tokens = streams * (scale.context + scale.tokens // 2)
        read = size.weights(stored) + tokens * size.bytes_per_token
        flops = size.flops(streams, streams, tokens)
        settings = f"{scale.context} + {scale.tokens} tokens; {engine.settings}"
        key, what = f"steps/{name}/{stored}/{streams}", f"{title}, a step of {streams} stream{'s' * (streams > 1)}"
        context.add(Figure(key, what, engine.step_ms(streams), "ms", settings, read, flops))
    for length in scale.prompts:
        engine.generate(equal(1, length, 1))
        took = statistics.median(engine.generate(equal(1, length, 1)) for _ in range(_PROMPT_RUNS))
        flops = size.flops(length, 1, length * (length + 1) // 2)
        key, what = f"prompts/{name}/{stored}/{length}", f"{title}, prompts of {length:,} tokens"
        arithmetic: Arithmetic = "gemm-fp8" if stored == "fp8" else "gemm-bf16"
        settings = f"one in a step; {engine.settings}"
        context.add(
            Figure(key, what, length / took, "tok/s", settings, size.weights(stored), flops, arithmetic, amount=length)
        )
    if stored == "bf16":
        _sharegpt(context, engine, size)


def _limits(context: Context) -> dict[str, Any]:
    """Return the options that let all streams, and many requests, decode at once."""
    return {} if context.scale.device == "cpu" else {"max_num_seqs": 512}


def _sharegpt(context: Context, engine: TimedEngine, size: Size) -> None:
    name, (count, longest) = context.scale.big, context.scale.sharegpt
    requests = sharegpt_like(count, longest)
    took = engine.generate(requests)
    prompts, outputs = (sum(each) for each in zip(*lengths(requests), strict=True))
    read, flops = size.of_requests(lengths(requests), max(out for _, out in requests))
    settings = (
        f"{count:,} requests at once, log-normal lengths (medians 110 and 150, σ 1.1 and 0.9, 4 to {longest:,}), "
        f"{prompts:,} tokens in, {outputs:,} out, {engine.num_steps:,} steps, greedy; {engine.settings}"
    )
    title = f"{name} bf16, {count:,} ShareGPT-like requests, output"
    key = f"sharegpt/{name}/bf16"
    context.add(Figure(key, title, outputs / took, "tok/s", settings, read, flops, amount=outputs))
