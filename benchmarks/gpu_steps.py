"""Measure engine steps on a GPU: decodes, eager and as CUDA graphs, and prefills.

    python benchmarks/gpu_steps.py [--models Qwen3-0.6B Llama-3-8B] [--markdown FILE]

A decode is compared with the memory bandwidth: bytes of weights / step time / bandwidth of a copy. A prefill shows the
TFLOP/s of its GEMMs. transformers' `generate` runs on the same model for comparison. Models have the shapes of known
models and random weights. The time of a decode step is the median of the steps in which all streams get a token.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from attention import copy_bandwidth
from random_models import byte_tokenizer
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config

from stoker_engine import LLM, SamplingParams
from stoker_engine.engine import Engine

SHAPES: dict[str, PretrainedConfig] = {
    "Qwen3-0.6B": Qwen3Config(
        vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, tie_word_embeddings=True, bos_token_id=0,
        eos_token_id=0,
    ),
    "Llama-3-8B": LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=8192, bos_token_id=0, eos_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    ),
}  # fmt: skip
CONTEXT, TOKENS = 256, 96
STREAMS = (1, 8, 64, 256)
PROMPTS = ((1, 1024), (8, 1024), (2, 8000))

Row = tuple[str, str, str, float, str]


def prompts(count: int, length: int) -> list[list[int]]:
    """Return `count` prompts of `length` tokens, the same in every call."""
    rng = random.Random(count * length)
    return [[rng.randrange(1000, 40000) for _ in range(length)] for _ in range(count)]


class Timed:
    """Engine whose steps are timed."""

    def __init__(self, folder: Path, enforce_eager: bool) -> None:
        self._llm = LLM(
            str(folder),
            device="cuda",
            max_model_len=8192,
            enable_prefix_caching=False,
            enforce_eager=enforce_eager,
            gpu_memory_utilization=0.4,
        )
        assert isinstance(self._llm.engine, Engine)
        #: Per step: number of requests that got output, and duration in seconds.
        self.steps: list[tuple[int, float]] = []
        step = self._llm.engine.step

        def timed() -> Any:
            began = time.perf_counter()
            outputs = step()
            self.steps.append((len(outputs.deltas), time.perf_counter() - began))
            return outputs

        self._llm.engine.step = timed  # type: ignore[method-assign]

    def generate(self, count: int, length: int, tokens: int) -> float:
        """Generate, and return the total time in seconds; `steps` contains the time of each step."""
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        self.steps.clear()
        began = time.perf_counter()
        self._llm.generate(prompts(count, length), params, use_tqdm=False)
        return time.perf_counter() - began

    def decode_ms(self, streams: int) -> float:
        """Return the median time of a step in which all streams decode, in ms."""
        self.generate(streams, CONTEXT, 4)
        self.generate(streams, CONTEXT, TOKENS)
        return 1e3 * statistics.median(took for count, took in self.steps[4:] if count == streams)


def transformers_ms(folder: Path, streams: int) -> float:
    """Return the time per token of transformers' `generate` with its own cache, in ms."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map="cuda")
    ids = torch.tensor(prompts(streams, CONTEXT), device="cuda")

    def seconds_for(tokens: int) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        model.generate(  # type: ignore[misc]
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
            pad_token_id=0,
        )  # fmt: skip
        torch.cuda.synchronize()
        return time.perf_counter() - began

    seconds_for(2)
    return 1e3 * (seconds_for(18) - seconds_for(2)) / 16


def rows_of(name: str, folder: Path, bandwidth: float) -> Iterator[Row]:
    """Yield all measurements of a model."""
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    found: dict[bool, dict[int, float]] = {True: {}, False: {}}
    for eager in (True, False):
        engine = Timed(folder, eager)
        for streams in STREAMS if not eager else STREAMS[:1] + STREAMS[2:3]:
            found[eager][streams] = engine.decode_ms(streams)
        if not eager:
            for count, length in PROMPTS:
                engine.generate(count, length, 1)
                seconds = engine.generate(count, length, 1)
                done = f"{weights * count * length / seconds / 1e12:.0f} TFLOP/s in GEMMs"
                yield name, f"prompts {count} × {length:,}", "Stoker", 1e3 * seconds, done
        del engine
        torch.cuda.empty_cache()
    for streams, took in found[False].items():
        share = weights / took / 1e6 / bandwidth
        yield name, f"decode {streams}", "Stoker", took, f"weights at {share:.0%} of a copy's bandwidth"
        if streams in found[True]:
            yield name, f"decode {streams}", "Stoker, --enforce-eager", found[True][streams], ""
        if streams in (1, 64):
            yield name, f"decode {streams}", "transformers", transformers_ms(folder, streams), ""
            torch.cuda.empty_cache()


def make_model(name: str, folder: Path) -> None:
    """Save a model of a known shape with random weights, in bfloat16."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        AutoModelForCausalLM.from_config(SHAPES[name], dtype=torch.bfloat16).save_pretrained(folder)
    torch.cuda.empty_cache()
    byte_tokenizer().save_pretrained(folder)


def main() -> int:
    """Print the table. Return exit code 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/gpu_steps.py: no GPU found", file=sys.stderr)
        return 2
    bandwidth = copy_bandwidth()
    title = f"{torch.cuda.get_device_name()}, torch {torch.__version__}; a copy moves {bandwidth:.0f} GB/s"
    table, lines = Table(title=title), [title, "", "| model | | by | ms | |", "|---|---|---|---|---|"]
    for column in ("model", "", "by", "ms", ""):
        table.add_column(column)
    for name in options.models:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            make_model(name, Path(folder))
            for model, case, by, took, note in rows_of(name, Path(folder), bandwidth):
                table.add_row(model, case, by, f"{took:.2f}", note)
                lines.append(f"| {model} | {case} | {by} | {took:.2f} | {note} |")
                print(lines[-1], flush=True)
    Console(width=140).print(table)
    if options.markdown:
        options.markdown.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
