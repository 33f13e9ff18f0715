"""Measure a step's host cost outside the model: schedule, prepare, sample, commit; and the size of its messages.

The engine is real, but its model computes nothing: it returns constant logits over a small vocabulary. What remains is
the cost of many sequences: time, and the bytes of a step and its result when ranks run in other processes.

    python benchmarks/host_overhead.py [--sequences 256] [--tokens 512] [--steps 200]
"""

from __future__ import annotations

import argparse
import gc
import pickle
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.attention.backend import AttentionBackend
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.core.engine_request import EngineRequest
from stoker_engine.core.sampling_params import SamplingParams
from stoker_engine.core.step import Step, StepResult
from stoker_engine.engine import Engine
from stoker_engine.exec.executor import LocalExecutor
from stoker_engine.exec.runner import Runner
from stoker_engine.layers.build import Build
from stoker_engine.models.checkpoint import Checkpoint
from stoker_engine.models.model import StepInputs
from stoker_engine.models.model_card import ModelCard
from stoker_engine.sizing.weight_formats import ALL_NUMBERS, WeightFormats

VOCABULARY = 256

CONFIG = ModelConfig.from_dict(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "max_position_embeddings": 16384,
        "dtype": "float32",
    }
)


class NoModel:
    """Model that computes nothing."""

    config = CONFIG

    def __init__(self, most_rows: int, backend: AttentionBackend) -> None:
        self.backend = backend
        generator = torch.Generator().manual_seed(0)
        self._hidden = torch.zeros(most_rows, 1)
        self._logits = torch.randn(most_rows, VOCABULARY, generator=generator)

    def forward(self, inputs: StepInputs, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """See `Model.forward`."""
        return self._hidden[: len(inputs.token_ids if inputs.rows is None else inputs.rows)]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Model.logits`."""
        return self._logits[: len(hidden)]


@dataclass(frozen=True)
class NoLoader:
    """Loader of `NoModel`."""

    most_rows: int

    def weight_formats(self, *_: Any) -> WeightFormats:
        """See `Loader.weight_formats`."""
        return ALL_NUMBERS

    def kv_scales(self, *_: Any) -> dict[int, Any]:
        """See `Loader.kv_scales`."""
        return {}

    def load(self, config: ModelConfig, build: Build, *_: Any) -> NoModel:
        """See `Loader.load`."""
        return NoModel(self.most_rows, build.backend)


class Watched(LocalExecutor):
    """Executor that records its steps and results."""

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner)
        self.steps: list[Step] = []
        self.results: list[StepResult] = []

    def launch(self, step: Step) -> None:
        """See `Executor`."""
        self.steps.append(step)
        super().launch(step)

    def collect(self) -> StepResult:
        """See `Executor`."""
        self.results.append(super().collect())
        return self.results[-1]


def measure(params: SamplingParams, sequences: int, tokens: int, steps: int) -> dict[str, float]:
    """Return medians over decode steps, in milliseconds and bytes."""
    args = EngineArgs(
        "-",
        device="cpu",
        max_num_seqs=sequences,
        max_num_batched_tokens=8192,
        long_prefill_token_threshold=0,
        max_model_len=16384,
        num_gpu_blocks_override=max(sequences * ((tokens + steps + 232) // 16 + 1), 1024) + 1,
    )
    checkpoint = Checkpoint(Path("-"), CONFIG, ModelCard(), NoLoader(8192))
    engine = Engine(args, checkpoint)
    for index in range(sequences):
        prompt = [(index * 7 + position) % VOCABULARY for position in range(tokens - 1)]
        engine.add(EngineRequest(str(index), prompt, params, steps + 200, seed=index))
    while engine.scheduler.stats().num_waiting or len(engine.step().deltas) < sequences:
        engine.step()
    gc.collect()
    gc.freeze()  # as in the engine process
    assert isinstance(engine.executor, LocalExecutor)
    watched = engine.executor = Watched(engine.executor.runner)
    parts: dict[str, list[float]] = {name: [] for name in ("schedule", "prepare", "sample", "commit", "all, CPU time")}
    for _ in range(steps):
        started = time.thread_time()
        outputs = engine.step()
        parts["all, CPU time"].append(time.thread_time() - started)
        assert outputs.report is not None and len(outputs.deltas) == sequences
        for name in ("schedule", "prepare", "sample", "commit"):
            parts[name].append(getattr(outputs.report.times, name))
    medians = {name: statistics.median(times) * 1000 for name, times in parts.items()}
    sent = [pickle.dumps(step, pickle.HIGHEST_PROTOCOL) for step in watched.steps]
    answered = [pickle.dumps(result, pickle.HIGHEST_PROTOCOL) for result in watched.results]
    return {
        **medians,
        "step, bytes": statistics.median(map(len, sent)),
        "result, bytes": statistics.median(map(len, answered)),
        "write a step": _median_ms(lambda step: pickle.dumps(step, pickle.HIGHEST_PROTOCOL), watched.steps),
        "read a step": _median_ms(pickle.loads, sent),
        "write a result": _median_ms(lambda r: pickle.dumps(r, pickle.HIGHEST_PROTOCOL), watched.results),
        "read a result": _median_ms(pickle.loads, answered),
    }


def _median_ms(act: Callable[[Any], object], things: list[Any]) -> float:
    times = []
    for thing in things:
        started = time.perf_counter()
        act(thing)
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1000


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    torch.set_num_threads(1)
    kinds = {
        "greedy": SamplingParams(temperature=0, ignore_eos=True, max_tokens=None),
        "drawn": SamplingParams(temperature=1, seed=1, ignore_eos=True, max_tokens=None),
        "penalised": SamplingParams(temperature=0, repetition_penalty=1.1, ignore_eos=True, max_tokens=None),
    }
    found = {name: measure(params, args.sequences, args.tokens, args.steps) for name, params in kinds.items()}
    title = f"One step with {args.sequences} decodes after {args.tokens} tokens; ms, medians of {args.steps} steps"
    table = Table("", *kinds, title=title)
    for row in found["greedy"]:
        numbers = (found[name][row] for name in kinds)
        table.add_row(row, *(f"{number:.0f}" if "bytes" in row else f"{number:.3f}" for number in numbers))
    Console().print(table)


if __name__ == "__main__":
    main()
