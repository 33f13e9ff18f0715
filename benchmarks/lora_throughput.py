"""Compare the throughput with LoRA adapters with vLLM's on this CPU.

    python benchmarks/lora_throughput.py [--models gemma B] [--ranks 16 64] [--workloads W2 decode-8] [--rounds 3]

Eight adapters on all linear operations of the layers, assigned to the requests in turn; both engines' offline APIs, in
bfloat16, measured alternately. Workloads (benchmarks/workloads.py, benchmarks/cpu/workloads.py):

    W2         32 concurrent requests, 32 to 512 tokens in, 32 to 128 out
    decode-N   N concurrent requests, 8 tokens in, 64 out

Installing vLLM takes some minutes and 7 GB in ``$STOKER_BENCH_CACHE``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from cpu.engines import vllm
from cpu.engines.child import Worker
from cpu.engines.engine import check_counts
from cpu.environments import cache_folder
from cpu.workloads import ROOM, workload
from lora import ADAPTERS, MODELS, bfloat16_model, save_adapter
from machine import Machine
from rich.console import Console
from rich.table import Table

WORKLOADS = ("W2", "decode-8", "decode-32")


def tokens_per_second(
    model: Path, adapters: list[str], workloads: list[str], rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Return output tokens per second of each round, by workload and engine."""
    logs = cache_folder() / "logs"
    given = {"ADAPTERS": json.dumps(adapters)}
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with ExitStack() as stack:
        engines = {
            "stoker": Worker(sys.executable, "lora_engines.stoker", model, ROOM, logs / "stoker-lora.log", given),
        }
        stack.callback(engines["stoker"].close)
        engines["vllm"] = Worker(
            vllm.installed(cache_folder()), "lora_engines.vllm", model, ROOM, logs / "vllm-lora.log", vllm.ENV | given
        )
        stack.callback(engines["vllm"].close)
        for turn in range(rounds + 1):
            for name in workloads:
                for engine, worker in engines.items() if turn % 2 else reversed(engines.items()):
                    work = workload(name, turn)
                    finished = worker.run(work)
                    check_counts(work, finished)
                    if turn:  # the first round is the warm-up
                        found[name][engine].append(work.num_output_tokens / finished.seconds)
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["gemma", "B"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[16, 64])
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=[*WORKLOADS])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    vllm.installed(cache_folder())
    table = Table("model", "rank", "workload", "Stoker tok/s", "vLLM tok/s", "ratio", title=Machine.measure().name)
    with TemporaryDirectory() as folder:
        for model in options.models:
            for rank in options.ranks:
                source = bfloat16_model(model)
                paths = [
                    str(save_adapter(Path(folder) / f"{model}-{rank}-{number}", str(source), rank, number))
                    for number in range(ADAPTERS)
                ]
                for name, speeds in tokens_per_second(source, paths, options.workloads, options.rounds).items():
                    ratio = statistics.median(
                        ours / theirs for ours, theirs in zip(speeds["stoker"], speeds["vllm"], strict=True)
                    )
                    medians = (f"{statistics.median(speeds[engine]):.0f}" for engine in ("stoker", "vllm"))
                    table.add_row(model, f"{rank}", name, *medians, f"{ratio:.2f}")
                Console(width=100).print(table)


if __name__ == "__main__":
    main()
