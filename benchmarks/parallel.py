"""Measure ranks and data-parallel engines on this machine.

steps     a tiny model on 1, 2, 4 and 8 ranks: bytes and messages of a step, the host's time, time of the whole step
speed     model B: one process with all CPUs against two ranks that share them, alternating, on W1 and W2
routing   see `dp_routing`

python benchmarks/parallel.py [steps] [speed] [routing] [--rounds 5] [--output FILE.md]
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from dp_routing import decision_us, route
from machine import cpu_name
from random_models import SHAPES, random_model
from rich.progress import track
from transformers import AutoModelForCausalLM, LlamaConfig
from workloads import Workload, workloads

from stoker_engine.contract.cache_folder import cache_folder
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.core.engine_request import EngineRequest
from stoker_engine.core.sampling_params import SamplingParams
from stoker_engine.core.step import Step
from stoker_engine.engine import Engine
from stoker_engine.llm import LLM

RANKS = (1, 2, 4, 8)
SEQUENCES = 64
STEPS = 100
LAYERS = 4

Table = tuple[str, list[str], list[list[str]]]


def tiny_model() -> Path:
    """Return the folder of a Llama that divides among 8 ranks; it is generated on first use."""
    folder = cache_folder() / "benchmarks" / "tiny-llama"
    if not (folder / "config.json").is_file():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=4096,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=LAYERS,
            num_attention_heads=8,
            num_key_value_heads=8,
            max_position_embeddings=2048,
        )
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def step_of(ranks: int) -> dict[str, float]:
    """Return medians over steps in which `SEQUENCES` sequences decode, in bytes and milliseconds."""
    args = EngineArgs(
        str(tiny_model()),
        device="cpu",
        max_model_len=1024,
        num_gpu_blocks_override=SEQUENCES * 40,
        tensor_parallel_size=ranks,
    )
    engine = Engine.from_args(args)
    try:
        sizes, messages = _watched(engine)
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=None)
        for index in range(SEQUENCES):
            prompt = [(index * 7 + position) % 4000 for position in range(200)]
            engine.add(EngineRequest(str(index), prompt, params, STEPS + 300, seed=0))
        while engine.scheduler.stats().num_waiting or len(engine.step().deltas) < SEQUENCES:
            engine.step()
        sizes.clear()
        messages.clear()
        walls, hosts = list[float](), list[float]()
        for _ in range(STEPS):
            began, cpu = time.perf_counter(), time.thread_time()
            outputs = engine.step()
            walls.append(time.perf_counter() - began)
            hosts.append(time.thread_time() - cpu if ranks > 1 else 0.0)
            assert len(outputs.deltas) == SEQUENCES
        return {
            "bytes to each rank": statistics.median(sizes) if ranks > 1 else 0,
            "messages": (len(messages) + STEPS) / STEPS if ranks > 1 else 0,
            "host, ms": 1000 * statistics.median(hosts),
            "step, ms": 1000 * statistics.median(walls),
        }
    finally:
        engine.shutdown()


def _watched(engine: Engine) -> tuple[list[int], list[int]]:
    """Return lists that record the pickled sizes of launched steps, and of all messages to ranks."""
    sizes, messages, launch = list[int](), list[int](), engine.executor.launch
    for rank in getattr(engine.executor, "_ranks", ()):
        rank.send = _counted(rank.send, messages)

    def watched(step: Step) -> None:
        sizes.append(len(pickle.dumps(step, pickle.HIGHEST_PROTOCOL)))
        launch(step)

    engine.executor.launch = watched  # type: ignore[method-assign]
    return sizes, messages


def _counted(send: Callable[[bytes], None], messages: list[int]) -> Callable[[bytes], None]:
    def counted(data: bytes) -> None:
        messages.append(len(data))
        send(data)

    return counted


def steps(_: int) -> tuple[Table, Any]:
    """Measure a step on 1 to 8 ranks."""
    found = {ranks: step_of(ranks) for ranks in track(RANKS, "steps")}
    names = list(found[1])
    rows = [[str(ranks), *(_number(found[ranks][name]) for name in names)] for ranks in RANKS]
    title = (
        f"A step in which {SEQUENCES} sequences decode; {LAYERS} layers of 256, {1 + 2 * LAYERS} all-reduces and one "
        f"gather; medians of {STEPS}. With more than {os.cpu_count()} ranks, ranks share CPUs"
    )
    return (title, ["ranks", *names], rows), found


def _number(value: float) -> str:
    return "–" if value == 0 else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def speed(rounds: int) -> tuple[Table, Any]:
    """Compare one process with ranks, alternating."""
    ranks = 2
    options: dict[str, Any] = {"device": "cpu", "max_model_len": 2048, "enable_prefix_caching": False}
    took: dict[str, dict[str, list[float]]] = {name: {"one": [], "ranks": []} for name in ("W1", "W2")}
    model = str(random_model("B"))
    with LLM(model, **options) as one, LLM(model, tensor_parallel_size=ranks, **options) as several:
        for number in track(range(rounds + 1), "speed"):
            of_round = workloads(number)
            for name, times in took.items():
                for kind, llm in (("one", one), ("ranks", several)):
                    seconds = _run(llm, of_round[name])
                    if number:  # the first warms up
                        times[kind].append(seconds)
    rows = []
    for name, times in took.items():
        tokens = workloads(0)[name].num_output_tokens
        ratios = [a / b for a, b in zip(times["one"], times["ranks"], strict=True)]
        speeds = [f"{tokens / statistics.median(times[kind]):.1f}" for kind in ("one", "ranks")]
        rows.append([name, *speeds, f"{statistics.median(ratios):.2f}", f"{min(ratios):.2f} … {max(ratios):.2f}"])
    title = (
        f"{SHAPES['B'][0]}, bfloat16: one process with {os.cpu_count()} threads, "
        f"and {ranks} ranks that share the CPUs; tokens/s"
    )
    return (title, ["", "one process", f"{ranks} ranks", "ratio", "range of rounds"], rows), took


def _run(llm: LLM, workload: Workload) -> float:
    params = [SamplingParams(temperature=0, ignore_eos=True, max_tokens=out) for _, out in workload.requests]
    began = time.perf_counter()
    outputs = llm.generate([prompt for prompt, _ in workload.requests], params, use_tqdm=False)
    seconds = time.perf_counter() - began
    assert sum(len(each.outputs[0].token_ids) for each in outputs) == workload.num_output_tokens
    return seconds


def routing(_: int) -> tuple[Table, Any]:
    """Compare the router with round robin."""
    rows, found = [], {}
    for engines in track((2, 4, 8), "routing"):
        cost = decision_us(engines)
        results = {
            kind: [route(seed, engines, kind == "router") for seed in range(3)] for kind in ("router", "round robin")
        }
        rates = [100 * statistics.mean(each.hit_rate for each in of_kind) for of_kind in results.values()]
        busiest = [statistics.mean(each.imbalance for each in of_kind) for of_kind in results.values()]
        rows.append([str(engines), f"{cost:.0f}", *(f"{rate:.1f}%" for rate in rates), *(f"{b:.2f}" for b in busiest)])
        found[engines] = {"decision_us": cost, "hit_rate": rates, "imbalance": busiest}
    title = (
        "Engines: time of a decision for 512 prompt tokens; share of prompt tokens cached; busiest engine × the mean"
    )
    return (title, ["engines", "µs", "router", "round robin", "busiest: router", "round robin"], rows), found


PARTS: dict[str, Callable[[int], tuple[Table, Any]]] = {"steps": steps, "speed": speed, "routing": routing}


def main() -> None:
    """Print the tables, and write them to `--output`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--output", type=Path, help="also write the tables to FILE.md, and the values to FILE.json beside it"
    )
    args = parser.parse_args()
    machine = f"{cpu_name()}, {os.cpu_count()} CPUs, torch {torch.__version__}"
    lines, figures = [f"# Ranks and engines\n\n{machine}\n"], {}
    for name in args.parts or PARTS:
        (title, header, rows), figures[name] = PARTS[name](args.rounds)
        table = [header, ["---"] * len(header), *rows]
        lines.append("\n".join([f"\n{title}\n", *(f"| {' | '.join(row)} |" for row in table), ""]))
        print(lines[-1])
    if args.output is not None:
        args.output.write_text("".join(lines))
        args.output.with_suffix(".json").write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
