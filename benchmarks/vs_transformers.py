"""Stoker against transformers' generate, in one run on one machine.

Times mean little on a shared machine, ratios within a run mean something. The two take turns; the median and the best
of `--rounds` are reported for each, with shares of what the machine can do at most:

    W1 reads all weights for each token: its share is of the memory's read speed
    W2 multiplies: its share is of the speed of a large product, over all tokens computed

transformers pads W2 on the left to the longest prompt and generates for as long as the longest output needs; only the
tokens that were requested count. W3 is Stoker's alone, with the number of prompt tokens it had to compute.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch
from machine import Machine
from random_models import SHAPES, random_model
from transformers import AutoModelForCausalLM
from workloads import Workload, workloads

from stoker_engine import LLM, SamplingParams

Run = Callable[[Workload], int]


def stoker(name: str, dtype: str) -> Run:
    """Stoker's offline API; returns how many prompt tokens came from the prefix cache."""
    llm = LLM(str(random_model(name)), dtype=dtype, kv_cache_memory_bytes=1 << 30)

    def run(workload: Workload) -> int:
        params = [SamplingParams(temperature=0, max_tokens=out, ignore_eos=True) for _, out in workload.requests]
        outputs = llm.generate([prompt for prompt, _ in workload.requests], params, use_tqdm=False)
        for output, (_, out) in zip(outputs, workload.requests, strict=True):
            assert len(output.outputs[0].token_ids) == out
        return sum(output.num_cached_tokens or 0 for output in outputs)

    return run


def transformers_generate(name: str, dtype: str) -> Run:
    """transformers' generate, padded on the left."""
    model: Any = AutoModelForCausalLM.from_pretrained(random_model(name), dtype=getattr(torch, dtype))
    model.eval()

    def run(workload: Workload) -> int:
        prompts = [prompt for prompt, _ in workload.requests]
        longest, out = max(map(len, prompts)), max(out for _, out in workload.requests)
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        with torch.inference_mode():
            got = model.generate(ids, attention_mask=mask, do_sample=False, min_new_tokens=out, max_new_tokens=out)
        assert got.shape[1] == longest + out
        return 0

    return run


@dataclass
class Speeds:
    """Output tokens a second, one number a round."""

    rounds: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{statistics.median(self.rounds):.1f} ({max(self.rounds):.1f})"


def measure(name: str, dtype: str, rounds: int) -> tuple[dict[tuple[str, str], Speeds], int]:
    """Speeds by (workload, engine) and the tokens of W3 that the cache saved."""
    engines = {"stoker": stoker(name, dtype), "transformers": transformers_generate(name, dtype)}
    speeds: dict[tuple[str, str], Speeds] = {}
    saved = 0
    for seed in range(rounds + 1):  # the first warms up
        for workload in workloads(seed).values():
            for engine, run in engines.items():
                if (workload.name, engine) == ("W3", "transformers"):
                    continue
                started = time.perf_counter()
                hits = run(workload)
                speed = workload.num_output_tokens / (time.perf_counter() - started)
                print(f"model {name} round {seed} {workload.name} {engine:13s} {speed:7.1f} tokens/s", flush=True)
                if workload.name == "W3":
                    saved = hits
                if seed:
                    speeds.setdefault((workload.name, engine), Speeds()).rounds.append(speed)
    return speeds, saved


def table(name: str, dtype: str, machine: Machine, speeds: dict[tuple[str, str], Speeds], saved: int) -> str:
    """A Markdown section."""
    with torch.device("meta"):
        weights = sum(p.numel() for p in AutoModelForCausalLM.from_config(SHAPES[name][1]).parameters())
    lines = [
        f"## Model {name}: {SHAPES[name][0]}, random weights, {dtype}",
        "",
        "| workload | Stoker, tokens/s: median (best) | transformers | ratio of medians | share of the ceiling |",
        "|---|---|---|---|---|",
    ]
    for workload in workloads(0).values():
        ours = speeds[workload.name, "stoker"]
        median = statistics.median(ours.rounds)
        theirs = speeds.get((workload.name, "transformers"))
        ratio = f"{median / statistics.median(theirs.rounds):.2f}" if theirs else ""
        if workload.name == "W1":
            share = median * weights * getattr(torch, dtype).itemsize / machine.read_bytes
        else:
            computed = sum(len(prompt) + out for prompt, out in workload.requests)
            computed -= saved if workload.name == "W3" else 0
            share = median / workload.num_output_tokens * computed * 2 * weights / machine.gemm_flops
        ceiling = f"{share:.0%} of {'memory read' if workload.name == 'W1' else 'GEMM'}"
        lines.append(f"| {workload.name} | {ours} | {theirs or '–'} | {ratio} | {ceiling} |")
    prompt_tokens = sum(len(prompt) for prompt, _ in workloads(0)["W3"].requests)
    lines += ["", f"W3 has {prompt_tokens:,} prompt tokens, of which {saved:,} came from the prefix cache.", ""]
    return "\n".join(lines)


def main() -> None:
    """Prints a Markdown report and writes it to results/."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--output", type=Path, help="default: results/DATE-cpu-DTYPE.md beside this file")
    options = parser.parse_args()

    before = Machine.measure()
    measured = {name: measure(name, options.dtype, options.rounds) for name in options.models}
    machine = before.better(Machine.measure())
    sections = [f"# Stoker and transformers' generate on {os.cpu_count()} CPU cores\n", f"{machine}.\n"]
    sections += [table(name, options.dtype, machine, *results) for name, results in measured.items()]
    report = "\n".join(sections)
    default = Path(__file__).parent / "results" / f"{date.today()}-cpu-{options.dtype}.md"
    (options.output or default).write_text(report)
    print("\n" + report)


if __name__ == "__main__":
    main()
