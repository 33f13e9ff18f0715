"""Prometheus metrics, with vLLM's names, labels and buckets, so that its dashboards and alerts work unchanged.

A request's life, and the intervals it is measured by (vLLM's definitions):

    arrival ──queue── scheduled ──prefill── first token ──decode── last token ── finished
       │                  └────────────────inference──────────────────┘             │
       ├────────time to first token──────────────┘                                  │
       └────────────────────────────────────e2e─────────────────────────────────────┘

Preemptions lie inside these intervals. A request that is aborted early has only those it got through.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
)

from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.core.engine_info import EngineInfo
from stoker_engine.core.finish_reason import FinishReason
from stoker_engine.core.step_report import AdapterStats, FinishedRequest, SchedulerStats, StepReport

#: Why requests are turned away: the limit that was reached.
ADMISSION_REASONS = ("max_num_queued_reqs", "max_num_queued_tokens")

_Family = TypeVar("_Family", Counter, Gauge, Histogram)

_NOTHING = SchedulerStats(0, 0, 0.0, 0, 0, 0)

# fmt: off
_SECONDS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_SECONDS_TO_FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)
_SECONDS_A_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_TOKENS_A_STEP = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_SECONDS_A_LOAD = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
_N = (1, 2, 5, 10, 20)
# fmt: on


def process_registry() -> CollectorRegistry:
    """A registry with metrics of this process."""
    registry = CollectorRegistry()
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    return registry


class EngineMetrics:
    """Watches the engines, together and one by one.

    Args:
        registry: where the metrics go.
        model_name: the label `model_name` of all of them.
        args: the engine's.
        infos: of each engine; the label `engine` says which one.
    """

    def __init__(
        self, registry: CollectorRegistry, model_name: str, args: EngineArgs, infos: Sequence[EngineInfo]
    ) -> None:
        self._families = families = _Families(registry)
        self._model_name = model_name
        self._engines = [
            DPEngineMetrics(families, model_name, str(engine), args, info) for engine, info in enumerate(infos)
        ]
        self._adapters = _AdaptersInUse(families, args.max_loras) if args.enable_lora else None
        rejections = families.counter(
            "vllm:admission_rejections", "Requests turned away by a queue's limit.", ("model_name", "reason")
        )
        self._rejections = {reason: rejections.labels(model_name, reason) for reason in ADMISSION_REASONS}

    def on_step(self, report: StepReport) -> None:
        """Takes down what a step did."""
        self._engines[report.engine].on_step(report)
        self._show_adapters(report.engine, report.stats.adapters)

    def on_death(self, engine: int = 0) -> None:
        """Takes down that an engine died."""
        self._engines[engine].on_death()
        self._show_adapters(engine, None)

    def on_restart(self, engine: int = 0) -> None:
        """Takes down that another engine takes the place of one that died."""
        self._engines[engine].on_restart()
        self._show_adapters(engine, None)

    def on_loaded_again(self, info: EngineInfo, engine: int = 0) -> None:
        """Takes down what the engine that took its place has."""
        self._engines[engine].show(info)

    def on_rejected(self, reason: str) -> None:
        """Takes down a request that a queue's limit turned away; `reason` is one of `ADMISSION_REASONS`."""
        self._rejections[reason].inc()

    def look_up_adapters(self, counts: Mapping[str, Callable[[], int]]) -> None:
        """Says from now on how many adapters are in each state, by asking; any thread may."""
        labels = ("model_name", "state")
        adapters = self._families.gauge("stoker:lora_adapters", "LoRA adapters that are to be served.", labels)
        for state, count in counts.items():
            adapters.labels(self._model_name, state).set_function(count)

    def look_up(self, engine: int, serves: Callable[[], bool]) -> None:
        """Says from now on whether an engine serves, by asking; any thread may."""
        self._engines[engine].look_up(serves)

    def _show_adapters(self, engine: int, stats: AdapterStats | None) -> None:
        if self._adapters is not None:
            self._adapters.show(engine, stats or AdapterStats())


class _AdaptersInUse:
    """vLLM's gauge of adapters in use: they are its labels, of which one set lives, and its value is the time of their
    last change. It has no label for the engine, so it is of all engines together."""

    def __init__(self, families: _Families, max_loras: int) -> None:
        names = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
        self._gauge = families.gauge("vllm:lora_requests_info", "Running stats on lora requests.", names)
        self._max_loras = str(max_loras)
        self._in_use: dict[int, tuple[tuple[str, ...], tuple[str, ...]]] = {}
        self._shown: tuple[str, ...] | None = None
        self.show(0, AdapterStats())

    def show(self, engine: int, stats: AdapterStats) -> None:
        """Takes down which adapters an engine's requests use."""
        if self._in_use.get(engine) == (stats.running, stats.waiting):
            return
        self._in_use[engine] = (stats.running, stats.waiting)
        running, waiting = (",".join(sorted(set().union(*names))) for names in zip(*self._in_use.values(), strict=True))
        values = (self._max_loras, running, waiting)
        if values == self._shown:
            return
        self._gauge.labels(*values).set_to_current_time()
        if self._shown is not None:
            self._gauge.remove(*self._shown)
        self._shown = values


class _Families:
    """Metrics by name. Each is made once, for all engines."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._made: dict[str, Any] = {}

    def gauge(self, name: str, help: str, labels: Iterable[str]) -> Gauge:
        """The gauge of that name."""
        return self._family(name, lambda: Gauge(name, help, tuple(labels), registry=self._registry))

    def counter(self, name: str, help: str, labels: Iterable[str]) -> Counter:
        """The counter of that name."""
        return self._family(name, lambda: Counter(name, help, tuple(labels), registry=self._registry))

    def histogram(self, name: str, help: str, labels: Iterable[str], buckets: Sequence[float]) -> Histogram:
        """The histogram of that name."""
        make = lambda: Histogram(name, help, tuple(labels), registry=self._registry, buckets=buckets)  # noqa: E731
        return self._family(name, make)

    def _family(self, name: str, make: Callable[[], _Family]) -> _Family:
        made: _Family = self._made.get(name) or make()
        self._made[name] = made
        return made


class DPEngineMetrics:
    """Watches one engine, from what its steps report.

    Args:
        families: where the metrics go.
        engine: which copy it is.
    """

    def __init__(self, families: _Families, model_name: str, engine: str, args: EngineArgs, info: EngineInfo) -> None:
        self._families = families
        self._args = args
        self._labels = {"model_name": model_name, "engine": engine}
        self._shown: dict[str, tuple[str, ...]] = {}  # the labels of those gauges that only say how it is
        self._reported = _NOTHING
        tokens = list(itertools.takewhile(lambda bound: bound <= info.max_model_len, _one_two_five()))

        self.show(info)

        self._running = self._gauge("num_requests_running", "Requests in the batch.")
        self._waiting = self._gauge("num_requests_waiting", "Requests waiting for a place in the batch.")
        # Nothing of ours is deferred; the reason is there because the two add up to num_requests_waiting.
        self._waiting_for_capacity, _ = self._gauges(
            "num_requests_waiting_by_reason", "Waiting requests by reason.", "reason", ("capacity", "deferred")
        )
        self._kv_cache_usage = self._gauge("kv_cache_usage_perc", "Share of the KV cache in use; 1 is all of it.")

        self._prefix_queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._prefix_hits = self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._cached_on_device, *_ = self._counters(
            "prompt_tokens_cached_by_source",
            "Prefix-cache hits by the tier that held them.",
            "source",
            ("device", "host", "p2p", "disk", "external_unspecified"),
        )
        self._preemptions = self._counter("num_preemptions", "Requests preempted.")
        self._corrupted = self._counter("corrupted_requests", "Requests that ended by nan or infinity in their logits.")

        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens processed, cached ones included.")
        self._computed, self._hit, _ = self._counters(
            "prompt_tokens_by_source",
            "Prompt tokens by where their keys and values came from.",
            "source",
            ("local_compute", "local_cache_hit", "external_kv_transfer"),
        )
        self._prompt_tokens_cached = self._counter("prompt_tokens_cached", "Prompt tokens that were cached.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._finished = dict(
            zip(
                FinishReason,
                self._counters("request_success", "Finished requests.", "finished_reason", list(FinishReason)),
                strict=True,
            )
        )

        self._restarts = self._counter("engine_restarts", "Deaths of the engine that the server outlived.", "stoker")
        self._up = families.gauge("stoker:engine_up", "Whether this engine of the model serves.", self._labels).labels(
            **self._labels
        )

        if args.enable_lora:
            self._adapter_loads = self._counter("lora_loads", "LoRA adapters read into memory.", "stoker")
            self._adapter_failures = self._counter(
                "lora_load_failures", "Loads of LoRA adapters that failed.", "stoker"
            )
            self._adapter_evictions = self._counter(
                "lora_evictions", "LoRA adapters dropped from memory to make room for others.", "stoker"
            )
            self._adapter_load_seconds = self._histogram(
                "lora_load_seconds", "Time that reading a LoRA adapter took.", _SECONDS_A_LOAD, "stoker"
            )

        self._step_tokens = self._histogram("iteration_tokens_total", "Tokens a step.", _TOKENS_A_STEP)
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token.", _SECONDS_TO_FIRST_TOKEN
        )
        self._inter_token = self._histogram(
            "inter_token_latency_seconds", "Between a request's tokens.", _SECONDS_A_TOKEN
        )

        # One observation a finished request, all from here on.
        self._request_prompt_tokens = self._histogram("request_prompt_tokens", "Prompt tokens.", tokens)
        self._request_computed = self._histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens computed, cached ones not included.", tokens
        )
        self._request_tokens = self._histogram("request_generation_tokens", "Tokens generated.", tokens)
        self._request_most_tokens = self._histogram(
            "request_max_num_generation_tokens", "Tokens of a request's longest output.", tokens
        )
        self._request_max_tokens = self._histogram("request_params_max_tokens", "The parameter max_tokens.", tokens)
        self._request_n = self._histogram("request_params_n", "The parameter n.", _N)
        self._request_preemptions = self._histogram("request_num_preemptions", "Times preempted.", _PREEMPTIONS)
        self._e2e = self._histogram("e2e_request_latency_seconds", "From arrival to the end.", _SECONDS)
        self._queue = self._histogram("request_queue_time_seconds", "From arrival to the first step.", _SECONDS)
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "From the first step to the first token.", _SECONDS
        )
        self._decode = self._histogram("request_decode_time_seconds", "From the first token to the last.", _SECONDS)
        self._inference = self._histogram(
            "request_inference_time_seconds", "From the first step to the last token.", _SECONDS
        )
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds", "Decode time by token, the first not counted.", _SECONDS_A_TOKEN
        )

    def show(self, info: EngineInfo) -> None:
        """Says how its cache and its model are from now on."""
        self._show_cache_config(info)
        self._show_model(info)

    def on_step(self, report: StepReport) -> None:
        """Takes down what a step did."""
        stats = report.stats
        self._show(stats)
        hits = stats.prefix_cache_hits - self._reported.prefix_cache_hits
        self._prefix_queries.inc(stats.prefix_cache_queries - self._reported.prefix_cache_queries)
        self._prefix_hits.inc(hits)
        self._cached_on_device.inc(hits)
        self._preemptions.inc(stats.num_preemptions - self._reported.num_preemptions)
        self._corrupted.inc(stats.num_corrupted - self._reported.num_corrupted)
        if stats.adapters is not None:
            self._count_adapters(stats.adapters, self._reported.adapters or AdapterStats())
        self._reported = stats

        if report.num_tokens:
            self._step_tokens.observe(report.num_prompt_tokens + report.num_new_tokens)
        self._generation_tokens.inc(report.num_new_tokens)
        for first in report.first_tokens:
            self._first_token.observe(first.seconds)
            self._prompt_tokens.inc(first.num_prompt_tokens)
            self._prompt_tokens_cached.inc(first.num_cached_tokens)
            self._hit.inc(first.num_cached_tokens)
            self._computed.inc(first.num_prompt_tokens - first.num_cached_tokens)
        for seconds in report.inter_token:
            self._inter_token.observe(seconds)
        for request in report.finished:
            self._on_finished(request)

    def _count_adapters(self, stats: AdapterStats, before: AdapterStats) -> None:
        self._adapter_loads.inc(stats.loads - before.loads)
        self._adapter_failures.inc(stats.failures - before.failures)
        self._adapter_evictions.inc(stats.evictions - before.evictions)
        for seconds in stats.load_seconds:
            self._adapter_load_seconds.observe(seconds)

    def on_death(self) -> None:
        """Takes down that it died: it has nothing any more, and another one counts again."""
        self._reported = _NOTHING
        self._show(_NOTHING)

    def on_restart(self) -> None:
        """Takes down that another one takes its place."""
        self._restarts.inc()
        self.on_death()

    def look_up(self, serves: Callable[[], bool]) -> None:
        """See `EngineMetrics.look_up`."""
        self._up.set_function(serves)

    def _show(self, stats: SchedulerStats) -> None:
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._waiting_for_capacity.set(stats.num_waiting)
        self._kv_cache_usage.set(stats.kv_cache_usage)

    def _on_finished(self, request: FinishedRequest) -> None:
        self._finished[request.finish_reason].inc()
        self._request_prompt_tokens.observe(request.num_prompt_tokens)
        self._request_tokens.observe(request.num_output_tokens)
        self._request_most_tokens.observe(request.longest_output)
        self._request_max_tokens.observe(request.max_tokens)
        self._request_n.observe(request.n)
        self._request_preemptions.observe(request.num_preemptions)
        self._e2e.observe(request.e2e)
        if request.queue is not None:
            self._queue.observe(request.queue)
        if request.prefill is None or request.decode is None:
            return
        self._request_computed.observe(request.num_prompt_tokens - request.num_cached_tokens)
        self._prefill.observe(request.prefill)
        self._decode.observe(request.decode)
        self._inference.observe(request.prefill + request.decode)
        self._per_token.observe(request.decode / max(1, request.longest_output - 1))

    def _show_cache_config(self, info: EngineInfo) -> None:
        """vLLM reports its cache's configuration as the labels of a gauge that is always 1.

        Concurrency is how many sequences of the greatest length the cache holds at once; tokens are theirs.
        """
        args = self._args
        labels = {
            "engine": self._labels["engine"],
            "block_size": info.block_size,
            "cache_dtype": args.kv_cache_dtype,
            "enable_prefix_caching": args.enable_prefix_caching,
            "gpu_memory_utilization": args.gpu_memory_utilization,
            "kv_cache_max_concurrency": info.max_concurrency,
            "kv_cache_memory_bytes": args.kv_cache_memory_bytes,
            "kv_cache_size_tokens": info.kv_tokens,
            "num_gpu_blocks": info.num_blocks,
            "num_gpu_blocks_override": args.num_gpu_blocks_override,
        }
        self._set_info("vllm:cache_config_info", "The KV cache's configuration.", labels)

    def _show_model(self, info: EngineInfo) -> None:
        """What vLLM has no metric for: in which dtype the model is computed, and how it is stored."""
        labels = {**self._labels, "dtype": info.dtype, "weights": info.weights, "kv_cache_dtype": info.kv_cache_dtype}
        self._set_info("stoker:model_info", "How the model is stored.", labels)

    def _set_info(self, name: str, help: str, labels: Mapping[str, object]) -> None:
        """Sets a gauge that says something by its labels; what this engine said by it before is taken back."""
        gauge = self._families.gauge(name, help, labels)
        values = tuple(map(str, labels.values()))
        before = self._shown.get(name, values)
        self._shown[name] = values
        gauge.labels(*values).set(1)
        if before != values:
            gauge.remove(*before)

    def _gauge(self, name: str, help: str) -> Gauge:
        return self._families.gauge(f"vllm:{name}", help, self._labels).labels(**self._labels)

    def _gauges(self, name: str, help: str, label: str, values: Sequence[str]) -> list[Gauge]:
        family = self._families.gauge(f"vllm:{name}", help, [*self._labels, label])
        return [family.labels(**self._labels, **{label: value}) for value in values]

    def _counter(self, name: str, help: str, prefix: str = "vllm") -> Counter:
        return self._families.counter(f"{prefix}:{name}", help, self._labels).labels(**self._labels)

    def _counters(self, name: str, help: str, label: str, values: Sequence[str]) -> list[Counter]:
        family = self._families.counter(f"vllm:{name}", help, [*self._labels, label])
        return [family.labels(**self._labels, **{label: value}) for value in values]

    def _histogram(self, name: str, help: str, buckets: Sequence[float], prefix: str = "vllm") -> Histogram:
        family = self._families.histogram(f"{prefix}:{name}", help, self._labels, buckets)
        return family.labels(**self._labels)


def _one_two_five() -> Iterable[int]:
    """1, 2, 5, 10, 20, 50, 100, …"""
    for exponent in itertools.count():
        for mantissa in (1, 2, 5):
            yield mantissa * 10**exponent
