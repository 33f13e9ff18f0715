"""``stoker bench latency``: run one batch repeatedly without a server, and report seconds per batch."""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from stoker_engine import logs
from stoker_engine.cli import command_line
from stoker_engine.cli.bench.datasets import Sample
from stoker_engine.cli.bench.offline import OfflineEngine
from stoker_engine.cli.bench.report import percentile, print_table, write_json
from stoker_engine.contract import argv
from stoker_engine.contract.argv import flag
from stoker_engine.contract.engine_args import EngineArgs

_PERCENTS = (10, 25, 50, 75, 90, 99)


@dataclass(frozen=True)
class LatencyArgs:
    """The batch, and the number of its runs. Each run has new prompts, so that the prefix cache has no hits."""

    input_len: int = flag("tokens of a prompt", 32)
    output_len: int = flag("tokens to generate", 128)
    batch_size: int = flag("requests of the batch", 8)
    n: int = flag("sequences per prompt", 1)
    use_beam_search: bool = flag("use beam search with n beams", False)
    num_iters_warmup: int = flag("warm-up runs, which are not measured", 3)
    num_iters: int = flag("measured runs", 10)
    disable_detokenize: bool = flag("do not detokenize the output", False)
    disable_tqdm: bool = flag("show no progress bar", False)
    output_json: str | None = flag("JSON file for the results", None)


def main(arguments: list[str]) -> int:
    """Run the command; return its exit code."""
    parser = argv.Parser(
        prog="stoker bench latency",
        description="Measure the latency of one batch. --model M is the same as MODEL.",
        allow_abbrev=False,
    )
    argv.add_arguments(parser, LatencyArgs, "batch")
    argv.add_arguments(parser, EngineArgs, "engine")
    namespace = command_line.parse(parser, command_line.with_model_flag(arguments))
    args = argv.from_namespace(LatencyArgs, namespace)
    logs.configure("text")
    offline = OfflineEngine(argv.from_namespace(EngineArgs, namespace))
    chance, vocabulary = random.Random(0), offline.engine.info.vocab_size

    def once() -> float:
        batch = [
            Sample([chance.randrange(vocabulary) for _ in range(args.input_len)], args.output_len)
            for _ in range(args.batch_size)
        ]
        run = offline.run(
            batch, n=args.n, beams=args.use_beam_search, detokenize=not args.disable_detokenize, show=False
        )
        return run.seconds

    for _ in tqdm(range(args.num_iters_warmup), desc="Warm-up", disable=args.disable_tqdm):
        once()
    latencies = [once() for _ in tqdm(range(args.num_iters), desc="Batches", disable=args.disable_tqdm)]
    figures: dict[str, Any] = {
        "avg_latency": statistics.fmean(latencies),
        "latencies": latencies,
        "percentiles": {str(percent): percentile(latencies, percent) for percent in _PERCENTS},
    }
    rows = {"Average (s):": figures["avg_latency"]}
    print_table("Latency", rows | {f"P{percent} (s):": value for percent, value in figures["percentiles"].items()})
    write_json(args.output_json, figures)
    return 0
