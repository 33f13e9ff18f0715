"""Measure how the cost of a step grows with prompt length, number of streams and context length.

    python benchmarks/curves.py MODEL [--most-prompt 16384] [--most-streams 256]

    prompt     one prompt of 128, 256 … tokens, one output token: microseconds per prompt token
    streams    1, 2 … sequences, 8 tokens in, 32 out: milliseconds per step, tokens per second
    context    8 sequences that decode after a prompt of 128, 256 … 2,048 tokens: milliseconds per step

Sampling is greedy, by the offline API, without prefix cache. Each value is the minimum of three runs. Step times are
the model runner's.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterator
from typing import Any

from machine import cpu_name
from rich.console import Console
from rich.table import Table

from stoker_engine import LLM, SamplingParams

RUNS = 3


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--most-prompt", type=int, default=16384)
    parser.add_argument("--most-streams", type=int, default=256)
    options = parser.parse_args()
    llm = LLM(
        options.model,
        dtype="bfloat16",
        max_model_len=options.most_prompt + 64,
        max_num_seqs=options.most_streams,
        max_num_batched_tokens=max(8 * 2048, options.most_prompt),  # all prompts in one step
        enable_prefix_caching=False,
    )
    console = Console()
    _run(llm, 1, 64, 8)
    table = Table("tokens of a prompt", "µs per token", "tokens/s", title=f"One prompt, {cpu_name()}")
    for length in _doubling(128, options.most_prompt):
        seconds = min(_run(llm, 1, length, 1)[0] for _ in range(RUNS))
        table.add_row(f"{length:,}", f"{seconds / length * 1e6:.0f}", f"{length / seconds:,.0f}")
    console.print(table)
    table = Table("streams", "ms per step", "tokens/s", title="Decoding, short contexts")
    for streams in _doubling(1, options.most_streams):
        step = min(_run(llm, streams, 8, 32)[1] for _ in range(RUNS))
        table.add_row(str(streams), f"{step * 1e3:.1f}", f"{streams / step:,.0f}")
    console.print(table)
    table = Table("tokens before", "ms per step", title="Eight streams")
    for length in _doubling(128, min(2048, options.most_prompt)):
        step = min(_run(llm, 8, length, 24)[1] for _ in range(RUNS))
        table.add_row(f"{length:,}", f"{step * 1e3:.1f}")
    console.print(table)


def _doubling(first: int, last: int) -> Iterator[int]:
    while first <= last:
        yield first
        first *= 2


def _run(llm: LLM, count: int, length: int, out: int) -> tuple[float, float]:
    """Return the total time, and the median time of the steps in which all sequences decode, in seconds."""
    tokens = random.Random(length * 1000 + count)
    prompts: list[Any] = [
        {"prompt_token_ids": [tokens.randrange(1000, 40_000) for _ in range(length)]} for _ in range(count)
    ]
    params = SamplingParams(temperature=0, max_tokens=out, ignore_eos=True)
    engine: Any = llm.engine
    runner, steps = engine.executor.runner, list[float]()
    run = type(runner).run

    def timed(step: Any) -> Any:
        started = time.perf_counter()
        result = run(runner, step)
        if sum(step.lengths) == len(step.lengths) == count:
            steps.append(time.perf_counter() - started)
        return result

    runner.run = timed
    started = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    del runner.run
    return time.perf_counter() - started, statistics.median(steps) if steps else 0.0


if __name__ == "__main__":
    main()
