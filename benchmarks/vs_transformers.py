"""Stoker against transformers' generate, in one run on one machine.

Times mean little on a shared machine, ratios within a run mean something. The two take turns; the best of
`--rounds` counts for each. Prompts are random token ids, new in every round, so that no cache carries over.

    W1  1 request, 128 tokens in, 64 out
    W2  16 requests at once, 32 … 256 in, 64 out
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from stoker_engine import LLM, SamplingParams
from stoker_engine.models.demo import demo_model

OUT = 64
Generate = Callable[[list[list[int]]], None]


def workloads(rng: random.Random) -> dict[str, list[list[int]]]:
    """Prompts of each workload."""

    def prompt(length: int) -> list[int]:
        return [rng.randrange(1000, 100_000) for _ in range(length)]

    return {"W1": [prompt(128)], "W2": [prompt(rng.randint(32, 256)) for _ in range(16)]}


def stoker(dtype: str) -> Generate:
    """Stoker's offline API."""
    llm = LLM("demo://gemma-3-270m", dtype=dtype, kv_cache_memory_bytes=512 << 20)
    params = SamplingParams(temperature=0, max_tokens=OUT, ignore_eos=True)

    def generate(prompts: list[list[int]]) -> None:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == OUT for output in outputs)

    return generate


def transformers_generate(dtype: str) -> Generate:
    """transformers' generate, padded on the left."""
    path = demo_model("gemma-3-270m")
    model: Any = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=getattr(torch, dtype))
    model.eval()

    def generate(prompts: list[list[int]]) -> None:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=mask, do_sample=False, min_new_tokens=OUT, max_new_tokens=OUT)
        assert out.shape[1] == longest + OUT

    return generate


def main() -> None:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()

    engines = {"stoker": stoker(options.dtype), "transformers": transformers_generate(options.dtype)}
    best: dict[tuple[str, str], float] = {}
    for round_ in range(options.rounds + 1):  # the first warms up
        for name, prompts in workloads(random.Random(round_)).items():
            for engine, generate in engines.items():
                started = time.monotonic()
                generate(prompts)
                speed = len(prompts) * OUT / (time.monotonic() - started)
                print(f"round {round_} {name} {engine:13s} {speed:7.1f} tokens/s", flush=True)
                if round_:
                    best[name, engine] = max(speed, best.get((name, engine), 0.0))

    print(f"\nGemma 3 270M, {options.dtype}, {cpu_name()}, {os.cpu_count()} CPUs, torch {torch.__version__}\n")
    print("| workload | Stoker, tokens/s | transformers, tokens/s | ratio |\n|---|---|---|---|")
    for name in ("W1", "W2"):
        ours, theirs = best[name, "stoker"], best[name, "transformers"]
        print(f"| {name} | {ours:.1f} | {theirs:.1f} | {ours / theirs:.2f} |")


def cpu_name() -> str:
    """The processor's name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


if __name__ == "__main__":
    main()
