"""Measure the cost of LoRA adapters on a step on this CPU.

    python benchmarks/lora.py [--models gemma B] [--ranks 16 64] [--workloads decode-8 prompts] [--rounds 5]

For each model and rank, with adapters on all linear operations of the layers:

    base        LoRA off
    unused      LoRA on, requests without adapters
    adapters    eight adapters, assigned to the requests in turn
    bound       time of a base step plus that of reading the adapters' bytes once at memory bandwidth

``decode-N``: N streams, one token each per step. ``prompts``: eight prompts of 1,024 tokens. Values are medians over
the rounds; the engines alternate within a round.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from cpu.models import write
from machine import Machine
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from stoker_common.block_hash import CacheKeys
from stoker_engine.contract.cache_folder import cache_folder
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.core.adapter import NO_ADAPTER, AdapterSource
from stoker_engine.core.engine_request import EngineRequest
from stoker_engine.core.sampling_params import SamplingParams
from stoker_engine.engine import Engine
from stoker_engine.models.checkpoint import find_checkpoint

ADAPTERS = 8
PROMPT, DECODED = 1024, 48
MODELS = ("gemma", "A", "B")


def save_adapter(folder: Path, model: str, rank: int, seed: int) -> Path:
    """Save an adapter on all linear operations of a model's layers, as PEFT does, in bfloat16."""
    config = find_checkpoint(EngineArgs(model)).config
    generator, tensors = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
    hidden = config.hidden_size
    for index, layer in enumerate(config.layers):
        attention, inner = layer.attention, layer.mlp.size
        width, kv_width = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
        sizes = {
            "self_attn.q_proj": (hidden, width),
            "self_attn.k_proj": (hidden, kv_width),
            "self_attn.v_proj": (hidden, kv_width),
            "self_attn.o_proj": (width, hidden),
            "mlp.gate_proj": (hidden, inner),
            "mlp.up_proj": (hidden, inner),
            "mlp.down_proj": (inner, hidden),
        }
        for name, (inputs, outputs) in sizes.items():
            prefix = f"base_model.model.model.layers.{index}.{name}"
            for half, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                numbers = torch.randn(shape, generator=generator) * 0.02
                tensors[f"{prefix}.lora_{half}.weight"] = numbers.to(torch.bfloat16)
    folder.mkdir(parents=True)
    modules = sorted({name.split(".")[1] for name in sizes})
    described = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": modules}
    (folder / "adapter_config.json").write_text(json.dumps(described))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def bfloat16_model(name: str) -> Path:
    """Return the folder of a model in bfloat16, in the cache folder; it is generated on first use."""
    folder = cache_folder() / "benchmarks" / f"bfloat16-{name}"
    if not (folder / "tokenizer.json").is_file():
        write(name, folder)
    return folder


def engine_of(model: str, lora: bool, rank: int) -> Engine:
    """Create an engine without prefix cache, so that each round computes the same."""
    args = EngineArgs(
        model,
        device="cpu",
        dtype="bfloat16",
        max_model_len=PROMPT + DECODED + 1,
        max_num_seqs=32,
        enable_prefix_caching=False,
        long_prefill_token_threshold=0,
    )
    return Engine.from_args(replace(args, enable_lora=True, max_loras=ADAPTERS, max_lora_rank=rank) if lora else args)


def step_seconds(engine: Engine, streams: int, length: int, tokens: int, adapters: int) -> float:
    """Return the median time of steps in which `streams` requests decode, in seconds.

    With one output token (`tokens`), return the time to compute all prompts instead.

    Args:
        adapters: number of adapters, assigned to the requests in turn.
    """
    rng = random.Random(streams)
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    for index in range(streams):
        prompt = [rng.randrange(1000, 40000) for _ in range(length)]
        adapter = index % adapters if adapters else NO_ADAPTER
        keys = CacheKeys(root_key=b"%d" % adapter) if adapters else CacheKeys()
        engine.add(EngineRequest(f"{index}", prompt, params, tokens, cache_keys=keys, adapter=adapter))
    started, decodes, prompts = time.perf_counter(), list[float](), 0.0
    while engine.has_work:
        before = time.perf_counter()
        report = engine.step().report
        seconds = time.perf_counter() - before
        if (
            report is not None
            and report.num_tokens == report.num_new_tokens == streams
            and not report.num_prompt_tokens
        ):
            decodes.append(seconds)
        elif report is not None and report.num_prompt_tokens:
            prompts = time.perf_counter() - started
    return statistics.median(decodes) if decodes else prompts


@dataclass
class Figures:
    """Step times of one workload in seconds, one value per round."""

    base: list[float]
    unused: list[float]
    adapters: list[float]

    def ratios(self, extra: float) -> tuple[float, float]:
        """Return median ratios over the rounds: unused / base, and adapters / bound.

        Args:
            extra: seconds of reading the adapters once.
        """
        unused = statistics.median(u / b for u, b in zip(self.unused, self.base, strict=True))
        adapters = statistics.median(a / (b + extra) for a, b in zip(self.adapters, self.base, strict=True))
        return unused, adapters


WORKLOADS = {
    "decode-8": (8, 16, DECODED),
    "decode-32": (32, 16, DECODED),
    "prompts": (8, PROMPT, 1),
}


def measure(
    model: str, rank: int, workloads: list[str], rounds: int, machine: Machine, table: Table, folder: Path
) -> None:
    """Add the rows of one model and rank."""
    source = str(bfloat16_model(model))
    base, lora = engine_of(source, False, rank), engine_of(source, True, rank)
    num_bytes = 0
    for number in range(ADAPTERS):
        path = save_adapter(folder / f"{model}-{rank}-{number}", source, rank, number)
        loading = lora.load_adapter(AdapterSource(number, f"adapter-{number}", str(path)))
        while not loading.done():
            lora.step()
        num_bytes += loading.result().num_bytes
    extra = num_bytes / machine.read_bytes
    for name in workloads:
        figures = Figures([], [], [])
        turns = [(figures.base, base, 0), (figures.unused, lora, 0), (figures.adapters, lora, ADAPTERS)]
        for index in range(rounds + 1):
            for seconds, engine, count in turns if index % 2 else reversed(turns):
                seconds.append(step_seconds(engine, *WORKLOADS[name], count))
            if index == 0:  # warm-up
                for seconds, _, _ in turns:
                    seconds.clear()
        unused, adapters = figures.ratios(extra)
        medians = (statistics.median(each) * 1e3 for each in (figures.base, figures.unused, figures.adapters))
        table.add_row(
            model, f"{rank}", name, *(f"{each:.2f}" for each in medians), f"{extra * 1e3:.2f}", f"{unused:.3f}",
            f"{adapters:.3f}",
        )  # fmt: skip
    base.shutdown()
    lora.shutdown()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["gemma", "B"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[16, 64])
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=[*WORKLOADS])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    machine = Machine.measure()
    table = Table(
        "model", "rank", "workload", "base ms", "unused ms", "adapters ms", "adapters' bytes ms", "unused / base",
        "adapters / bound", title=f"{machine.name}, {machine.read_bytes / 1e9:.1f} GB/s",
    )  # fmt: skip
    with TemporaryDirectory() as folder:
        for model in options.models:
            for rank in options.ranks:
                measure(model, rank, options.workloads, options.rounds, machine, table, Path(folder))
                Console(width=140).print(table)


if __name__ == "__main__":
    main()
