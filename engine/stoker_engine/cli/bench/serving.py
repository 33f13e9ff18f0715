"""``stoker bench serve``: send requests to a running server, as many clients would.

    request ──► first token ─► token ─► token ──► end
       └─ TTFT ─────┘└─ ITL ─┘└─ ITL ─┘           │       TPOT: (E2EL − TTFT) ÷ (tokens − 1)
       └─ E2EL ───────────────────────────────────┘

Arrivals are a Poisson process at ``--request-rate`` (gamma-distributed intervals if ``--burstiness`` is not 1),
or all at once (rate ``inf``). Prompts are sent as token ids, so that their lengths are exact; every answer is streamed.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from stoker_common.bar_chart import BarChart
from stoker_common.errors import ArgumentError, StokerError
from stoker_engine.cli import command_line
from stoker_engine.cli.bench.datasets import DatasetArgs, Sample, load_dataset
from stoker_engine.cli.bench.report import percents, print_table, summary, write_json
from stoker_engine.cli.bench.serving_plot import chart_lines
from stoker_engine.cli.lines import stream_lines
from stoker_engine.cli.server_url import root_url
from stoker_engine.contract import argv
from stoker_engine.contract.argv import flag
from stoker_engine.contract.engine_args import EngineArgs

if TYPE_CHECKING:
    import httpx

_METRICS = {"ttft": "Time to First Token", "tpot": "Time per Output Token (excl. 1st token)"}
_METRICS |= {"itl": "Inter-token Latency", "e2el": "End-to-end Latency"}


@dataclass(frozen=True)
class BenchServeArgs:
    """How requests are sent."""

    base_url: str = flag("the server's URL, with or without /v1", "http://127.0.0.1:8000")
    model: str | None = flag("model name in requests; default: the server's first", None)
    tokenizer: str | None = flag("folder, GGUF file, demo://NAME or hub id of the tokenizer; default: --model", None)
    lora_modules: tuple[str, ...] = flag(
        "names of adapters, of which each request uses a random one (--seed) instead of the model", (), repeatable=True
    )
    request_rate: float = flag("requests per second; inf sends all at once", float("inf"), infinite=True)
    burstiness: float = flag("1: Poisson arrivals; below 1: in bursts; above 1: more evenly", 1.0)
    max_concurrency: int | None = flag("maximum requests in flight; default: no limit", None)
    num_warmups: int = flag("warm-up requests, sent one by one and not measured", 1)
    temperature: float = flag("sampling temperature; 0 is greedy", 0.0)
    ignore_eos: bool = flag("generate exactly as many tokens as the data set asks for", True)
    percentile_metrics: str = flag("latencies with percentiles: ttft, tpot, itl, e2el", "ttft,tpot,itl,e2el")
    metric_percentiles: str = flag("percentiles to report", "50,90,99")
    disable_tqdm: bool = flag("show no progress bar", False)
    plot: bool = flag("also draw the distributions of TTFT and ITL, and tokens per second over time", False)
    output_json: str | None = flag("JSON file for the results", None)

    def __post_init__(self) -> None:
        if not self.request_rate > 0:
            raise ArgumentError("--request-rate", f"must be above 0, got {self.request_rate}")
        if not 0 < self.burstiness < float("inf"):
            raise ArgumentError("--burstiness", f"must be finite and above 0, got {self.burstiness}")
        if not 0 <= self.temperature < float("inf"):
            raise ArgumentError("--temperature", f"must be finite and at least 0, got {self.temperature}")
        unknown = set(self.percentile_metrics.split(",")) - set(_METRICS)
        if unknown:
            raise ArgumentError("--percentile-metrics", f"unknown: {', '.join(unknown)}; known: {', '.join(_METRICS)}")
        percents(self.metric_percentiles, "--metric-percentiles")


@dataclass
class ChatAnswer:
    """Result of a request; times in seconds, `start` since the benchmark's start."""

    prompt_len: int
    ttft: float = 0.0
    e2el: float = 0.0
    itl: list[float] = field(default_factory=list)
    output_len: int = 0
    error: str | None = None
    start: float = 0.0


def main(arguments: list[str]) -> int:
    """Run the command; return its exit code (1: a request failed)."""
    parser = argv.Parser(prog="stoker bench serve", description="Measure a running server.", allow_abbrev=False)
    argv.add_arguments(parser, BenchServeArgs, "requests")
    argv.add_arguments(parser, DatasetArgs, "data set")
    namespace = command_line.parse(parser, arguments)
    return asyncio.run(
        _run(argv.from_namespace(BenchServeArgs, namespace), argv.from_namespace(DatasetArgs, namespace))
    )


async def _run(args: BenchServeArgs, dataset: DatasetArgs) -> int:
    import httpx

    url = root_url("--base-url", args.base_url)
    key = command_line.api_key()
    async with httpx.AsyncClient(
        base_url=url,
        headers={"authorization": f"Bearer {key}"} if key else {},
        timeout=None,
        limits=httpx.Limits(max_connections=None),
    ) as client:
        try:
            models = (await client.get("/v1/models")).raise_for_status().json()["data"]
        except httpx.HTTPError as error:
            raise StokerError(f"{url} does not answer: {error}") from error
        name = args.model or models[0]["id"]
        samples = _samples(args, dataset, models)
        for sample in samples[: args.num_warmups]:
            warmup = await _ask(client, args, name, sample)
            if warmup.error is not None:
                raise StokerError(f"the first request failed: {warmup.error}")
        names = models_of(args, name, len(samples), dataset.seed)
        started = time.perf_counter()
        answers = await _send_all(client, args, names, samples, dataset.seed)
        duration = time.perf_counter() - started
    for answer in answers:
        answer.start -= started
    figures = figures_of(answers, duration, args)
    _print(figures, args)
    if args.plot:
        good = [answer for answer in answers if answer.error is None]
        print("", *chart_lines(good, duration, BarChart.to(sys.stdout)), sep="\n")
    write_json(args.output_json, figures)
    return 1 if figures["failed"] else 0


def _samples(args: BenchServeArgs, dataset: DatasetArgs, models: list[dict[str, Any]]) -> list[Sample]:
    from stoker_engine.models.hub.locate import locate_model
    from stoker_engine.tokens.tokenizer import Tokenizer

    source = args.tokenizer or next((model["root"] for model in models if model.get("root")), None) or args.model
    if source is None:
        raise ArgumentError("--tokenizer", "is required: the server does not report the source of its model")
    tokenizer = Tokenizer.load(locate_model(EngineArgs(source)))
    return load_dataset(dataset, tokenizer, tokenizer.vocab_size)


def models_of(args: BenchServeArgs, model: str, count: int, seed: int) -> list[str]:
    """Return the model of each request: `model`, or a random one of ``--lora-modules``, as in ``vllm bench serve``."""
    chance = random.Random(f"lora-modules {seed}")  # a separate generator, so that arrivals do not depend on adapters
    return [chance.choice(args.lora_modules) if args.lora_modules else model for _ in range(count)]


async def _send_all(
    client: httpx.AsyncClient, args: BenchServeArgs, models: list[str], samples: list[Sample], seed: int
) -> list[ChatAnswer]:
    from tqdm import tqdm

    chance = random.Random(seed)
    concurrency = asyncio.Semaphore(args.max_concurrency or len(samples))
    with tqdm(total=len(samples), desc="Requests", disable=args.disable_tqdm) as bar:

        async def one(model: str, sample: Sample) -> ChatAnswer:
            async with concurrency:
                answer = await _ask(client, args, model, sample)
            bar.update()
            return answer

        tasks = []
        at = time.perf_counter()
        for model, sample in zip(models, samples, strict=True):
            tasks.append(asyncio.create_task(one(model, sample)))
            if args.request_rate != float("inf"):
                # Each arrival is relative to the previous scheduled arrival, so that delays do not lower the rate.
                at += chance.gammavariate(args.burstiness, 1 / (args.request_rate * args.burstiness))
                await asyncio.sleep(max(0.0, at - time.perf_counter()))
        return await asyncio.gather(*tasks)


async def _ask(client: httpx.AsyncClient, args: BenchServeArgs, model: str, sample: Sample) -> ChatAnswer:
    import httpx

    body: dict[str, Any] = {
        "model": model,
        "prompt": sample.prompt,
        "max_tokens": sample.output_len,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": args.ignore_eos,
        "temperature": args.temperature,
    }
    answer = ChatAnswer(len(sample.prompt))
    started = last = answer.start = time.perf_counter()
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                answer.error = f"{response.status_code}: {(await response.aread()).decode(errors='replace')[:300]}"
                return answer
            async for line in stream_lines(response.aiter_bytes()):
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                now = time.perf_counter()
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    answer.error = event["error"]["message"]
                elif event.get("choices"):
                    if answer.ttft == 0.0:
                        answer.ttft = now - started
                    else:
                        answer.itl.append(now - last)
                    last = now
                if usage := event.get("usage"):
                    answer.output_len = usage["completion_tokens"]
    except (httpx.HTTPError, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.e2el = last - started
    return answer


def figures_of(answers: list[ChatAnswer], duration: float, args: BenchServeArgs) -> dict[str, Any]:
    """Return all results, under the names of ``vllm bench serve``."""
    good = [answer for answer in answers if answer.error is None]
    prompt, output = sum(a.prompt_len for a in good), sum(a.output_len for a in good)
    figures: dict[str, Any] = {
        "duration": duration,
        "completed": len(good),
        "failed": len(answers) - len(good),
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "request_throughput": len(good) / duration,
        "output_throughput": output / duration,
        "total_token_throughput": (prompt + output) / duration,
        "request_rate": args.request_rate if args.request_rate != float("inf") else "inf",
        "max_concurrency": args.max_concurrency,
        "errors": sorted({answer.error for answer in answers if answer.error is not None}),
    }
    seconds = {
        "ttft": [a.ttft for a in good],
        "tpot": [(a.e2el - a.ttft) / (a.output_len - 1) for a in good if a.output_len > 1],
        "itl": [gap for a in good for gap in a.itl],
        "e2el": [a.e2el for a in good],
    }
    for name in _METRICS:
        with_percentiles = name in args.percentile_metrics.split(",")
        figures |= summary(
            name, seconds[name], percents(args.metric_percentiles, "--metric-percentiles") if with_percentiles else []
        )
    return figures


def _print(figures: dict[str, Any], args: BenchServeArgs) -> None:
    rows: dict[str, Any] = {
        "Successful requests:": figures["completed"],
        "Failed requests:": figures["failed"],
        "Benchmark duration (s):": figures["duration"],
        "Total input tokens:": figures["total_input_tokens"],
        "Total generated tokens:": figures["total_output_tokens"],
        "Request throughput (req/s):": figures["request_throughput"],
        "Output token throughput (tok/s):": figures["output_throughput"],
        "Total token throughput (tok/s):": figures["total_token_throughput"],
    }
    for name, title in _METRICS.items():
        metric_figures = {key: value for key, value in figures.items() if key.endswith(f"_{name}_ms")}
        if metric_figures and name in args.percentile_metrics.split(","):
            rows[title] = None
            for key, value in metric_figures.items():
                statistic = key.removesuffix(f"_{name}_ms")
                label = statistic.upper() if statistic.startswith("p") else statistic.capitalize()
                rows[f"{label} {name.upper()} (ms):"] = value
    for error in figures["errors"][:5]:
        rows[f"Error: {error[:200]}"] = ""
    print_table("Serving Benchmark Result", rows)
