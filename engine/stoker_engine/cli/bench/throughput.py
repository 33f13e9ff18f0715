"""``stoker bench throughput``: run many requests through the engine without a server, and report tokens per second.

``--profile`` splits the time of a step into the model, the sampler, the scheduler (schedule and commit), and the rest,
which is Python code around them, including detokenization.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stoker_common.errors import ArgumentError
from stoker_engine import logs
from stoker_engine.cli import command_line
from stoker_engine.cli.bench.datasets import DatasetArgs, load_dataset
from stoker_engine.cli.bench.offline import OfflineEngine, Run
from stoker_engine.cli.bench.report import print_table, write_json
from stoker_engine.contract import argv
from stoker_engine.contract.argv import flag
from stoker_engine.contract.engine_args import EngineArgs


@dataclass(frozen=True)
class ThroughputArgs:
    """How requests are run."""

    n: int = flag("sequences per prompt", 1)
    num_warmups: int = flag("warm-up requests, which are not measured", 1)
    disable_detokenize: bool = flag("do not detokenize the output", False)
    profile: bool = flag("report the time of a step by phase", False)
    disable_tqdm: bool = flag("show no progress bar", False)
    output_json: str | None = flag("JSON file for the results", None)


def main(arguments: list[str]) -> int:
    """Run the command; return its exit code."""
    parser = argv.Parser(
        prog="stoker bench throughput",
        description="Measure the engine without a server. --model M is the same as MODEL.",
        allow_abbrev=False,
        conflict_handler="resolve",  # data set and engine share --seed
    )
    argv.add_arguments(parser, ThroughputArgs, "requests")
    argv.add_arguments(parser, DatasetArgs, "data set")
    argv.add_arguments(parser, EngineArgs, "engine")
    namespace = command_line.parse(parser, command_line.with_model_flag(arguments))
    args = argv.from_namespace(ThroughputArgs, namespace)
    dataset = argv.from_namespace(DatasetArgs, namespace)
    logs.configure("text")
    offline = OfflineEngine(argv.from_namespace(EngineArgs, namespace))
    info = offline.engine.info
    samples = load_dataset(dataset, offline.tokenizer, info.vocab_size)
    longest = max(len(sample.prompt) + sample.output_len for sample in samples)
    if longest > info.max_model_len:
        raise ArgumentError(
            "--max-model-len", f"a request has {longest} tokens, above the limit of {info.max_model_len}; raise it"
        )
    for sample in samples[: args.num_warmups]:
        # A single token, so that the sample's prompt is not in the prefix cache when it is measured.
        offline.run([type(sample)(sample.prompt[:1], 2)], show=False)
    run = offline.run(samples, n=args.n, detokenize=not args.disable_detokenize, show=not args.disable_tqdm)
    figures = figures_of(run, len(samples))
    _print(figures, profile=args.profile)
    write_json(args.output_json, figures)
    return 0


def figures_of(run: Run, num_requests: int) -> dict[str, Any]:
    """Return all results; results that ``vllm bench throughput`` has, too, are under its names."""
    scheduler = run.times["schedule"] + run.times["commit"]
    inside = scheduler + run.times["model"] + run.times["sample"]
    return {
        "elapsed_time": run.seconds,
        "num_requests": num_requests,
        "total_num_tokens": run.num_prompt_tokens + run.num_output_tokens,
        "requests_per_second": num_requests / run.seconds,
        "tokens_per_second": (run.num_prompt_tokens + run.num_output_tokens) / run.seconds,
        "output_tokens_per_second": run.num_output_tokens / run.seconds,
        "num_prompt_tokens": run.num_prompt_tokens,
        "num_output_tokens": run.num_output_tokens,
        "num_cached_tokens": run.num_cached_tokens,
        "steps": run.steps,
        "profile_seconds": {
            "model": run.times["model"],
            "sampler": run.times["sample"],
            "scheduler": scheduler,
            "rest": run.seconds - inside,
        },
    }


def _print(figures: dict[str, Any], profile: bool) -> None:
    rows: dict[str, Any] = {
        "Elapsed time (s):": figures["elapsed_time"],
        "Requests per second:": figures["requests_per_second"],
        "Total tokens per second:": figures["tokens_per_second"],
        "Output tokens per second:": figures["output_tokens_per_second"],
        "Prompt tokens:": figures["num_prompt_tokens"],
        "of which cached:": figures["num_cached_tokens"],
        "Output tokens:": figures["num_output_tokens"],
        "Steps:": figures["steps"],
    }
    if profile:
        rows["Time a step (ms), share"] = None
        for name, seconds in figures["profile_seconds"].items():
            share = f"{1000 * seconds / max(1, figures['steps']):.3f}  {seconds / figures['elapsed_time']:.1%}"
            rows[f"{name.capitalize()}:"] = share
    print_table("Throughput", rows)
