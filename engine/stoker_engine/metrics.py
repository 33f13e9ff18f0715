"""Prometheus metrics, with vLLM's names, labels and buckets, so that its dashboards and alerts work unchanged.

Intervals of a request (vLLM's definitions):

    arrival ──queue── scheduled ──prefill── first token ──decode── last token ── finished
       │                  └────────────────inference──────────────────┘             │
       ├────────time to first token──────────────┘                                  │
       └────────────────────────────────────e2e─────────────────────────────────────┘

Preemptions are part of these intervals. An aborted request has only the intervals that it completed; its last token is
then the last one before the abort.
"""

from __future__ import annotations

import collections
import itertools
from bisect import bisect_left
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

#: Values of the label `reason` of rejected requests: the limit that was reached.
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
    """Return a registry with Prometheus' standard metrics of this process."""
    registry = CollectorRegistry()
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    return registry


class EngineMetrics:
    """Metrics of all engines.

    Args:
        model_name: value of the label `model_name`.
        infos: properties of each engine, by the value of the label `engine`.
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
            "vllm:admission_rejections", "Requests rejected by a queue limit.", ("model_name", "reason")
        )
        self._rejections = {reason: rejections.labels(model_name, reason) for reason in ADMISSION_REASONS}

    def on_step(self, report: StepReport) -> None:
        """Record the report of an engine."""
        self._engines[report.engine].on_step(report)
        self._show_adapters(report.engine, report.stats.adapters)

    def on_death(self, engine: int = 0) -> None:
        """Record the death of an engine."""
        self._engines[engine].on_death()
        self._show_adapters(engine, None)

    def on_restart(self, engine: int = 0) -> None:
        """Record the start of a dead engine's restart."""
        self._engines[engine].on_restart()
        self._show_adapters(engine, None)

    def on_loaded_again(self, info: EngineInfo, engine: int = 0) -> None:
        """Set the info gauges of a restarted engine."""
        self._engines[engine].show(info)

    def on_rejected(self, reason: str) -> None:
        """Record a request that was rejected by a queue limit; `reason` is one of `ADMISSION_REASONS`."""
        self._rejections[reason].inc()

    def look_up_adapters(self, counts: Mapping[str, Callable[[], int]]) -> None:
        """Report the number of adapters by state; each scrape calls the functions in `counts`, from any thread."""
        labels = ("model_name", "state")
        adapters = self._families.gauge(
            "stoker:lora_adapters", "Configured LoRA adapters by state: loaded, loading, failed.", labels
        )
        for state, count in counts.items():
            adapters.labels(self._model_name, state).set_function(count)

    def look_up(self, engine: int, serves: Callable[[], bool]) -> None:
        """Report whether an engine serves by calling `serves` at each scrape, from any thread."""
        self._engines[engine].look_up(serves)

    def _show_adapters(self, engine: int, stats: AdapterStats | None) -> None:
        if self._adapters is not None:
            self._adapters.show(engine, stats or AdapterStats())


class _AdaptersInUse:
    """vLLM's gauge of adapters in use: its labels name the adapters, its value is the time at which the labels changed.

    Only one set of labels exists at a time. The gauge has no label for the engine, so it covers all engines.
    """

    def __init__(self, families: _Families, max_loras: int) -> None:
        names = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
        self._gauge = families.gauge("vllm:lora_requests_info", "Running stats on lora requests.", names)
        self._max_loras = str(max_loras)
        self._in_use: dict[int, tuple[tuple[str, ...], tuple[str, ...]]] = {}
        self._shown: tuple[str, ...] | None = None
        self.show(0, AdapterStats())

    def show(self, engine: int, stats: AdapterStats) -> None:
        """Record the adapters of an engine's running and waiting requests."""
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


def _observe_all(histogram: Histogram, values: Sequence[float]) -> None:
    """Observe each of `values`, with one update per bucket. A step has a value for each sequence, and prometheus_client
    has no method for several."""
    buckets = collections.Counter(bisect_left(histogram._upper_bounds, value) for value in values)
    for bucket, count in buckets.items():
        histogram._buckets[bucket].inc(count)
    histogram._sum.inc(sum(values))


class _Families:
    """Metric families by name, which the engines share."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._made: dict[str, Any] = {}

    def gauge(self, name: str, help: str, labels: Iterable[str]) -> Gauge:
        """Return the gauge of that name."""
        return self._family(name, lambda: Gauge(name, help, tuple(labels), registry=self._registry))

    def counter(self, name: str, help: str, labels: Iterable[str]) -> Counter:
        """Return the counter of that name."""
        return self._family(name, lambda: Counter(name, help, tuple(labels), registry=self._registry))

    def histogram(self, name: str, help: str, labels: Iterable[str], buckets: Sequence[float]) -> Histogram:
        """Return the histogram of that name."""
        make = lambda: Histogram(name, help, tuple(labels), registry=self._registry, buckets=buckets)  # noqa: E731
        return self._family(name, make)

    def _family(self, name: str, make: Callable[[], _Family]) -> _Family:
        made: _Family = self._made.get(name) or make()
        self._made[name] = made
        return made


class DPEngineMetrics:
    """Metrics of one engine, from the reports of its steps.

    Args:
        engine: value of the label `engine`.
    """

    def __init__(self, families: _Families, model_name: str, engine: str, args: EngineArgs, info: EngineInfo) -> None:
        self._families = families
        self._args = args
        self._labels = {"model_name": model_name, "engine": engine}
        self._shown: dict[str, tuple[str, ...]] = {}  # info gauge → its current label values
        self._reported = _NOTHING
        tokens = list(itertools.takewhile(lambda bound: bound <= info.max_model_len, _one_two_five()))

        self.show(info)

        self._running = self._gauge("num_requests_running", "Requests in the running batch.")
        self._waiting = self._gauge("num_requests_waiting", "Requests waiting to be scheduled.")
        # No request is ever deferred; the reason exists because the sum over reasons is num_requests_waiting.
        self._waiting_for_capacity, _ = self._gauges(
            "num_requests_waiting_by_reason", "Waiting requests by reason.", "reason", ("capacity", "deferred")
        )
        self._kv_cache_usage = self._gauge("kv_cache_usage_perc", "Fraction of the KV cache in use; 1 means full.")

        self._prefix_queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._prefix_hits = self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._cached_on_device, *_ = self._counters(
            "prompt_tokens_cached_by_source",
            "Prefix-cache hits by the tier that held them.",
            "source",
            ("device", "host", "p2p", "disk", "external_unspecified"),
        )
        self._preemptions = self._counter("num_preemptions", "Requests preempted.")
        self._corrupted = self._counter("corrupted_requests", "Requests that failed because of NaN or infinite logits.")

        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens processed, including cached ones.")
        self._computed, self._hit, _ = self._counters(
            "prompt_tokens_by_source",
            "Prompt tokens by the source of their keys and values.",
            "source",
            ("local_compute", "local_cache_hit", "external_kv_transfer"),
        )
        self._prompt_tokens_cached = self._counter("prompt_tokens_cached", "Prompt tokens found in a cache.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._finished = dict(
            zip(
                FinishReason,
                self._counters("request_success", "Finished requests.", "finished_reason", list(FinishReason)),
                strict=True,
            )
        )

        self._restarts = self._counter("engine_restarts", "Restarts of the engine after it died.", "stoker")
        self._up = families.gauge("stoker:engine_up", "Whether this engine serves: 1 or 0.", self._labels).labels(
            **self._labels
        )

        if args.enable_lora:
            self._adapter_loads = self._counter("lora_loads", "LoRA adapters loaded into memory.", "stoker")
            self._adapter_failures = self._counter("lora_load_failures", "Failed loads of LoRA adapters.", "stoker")
            self._adapter_evictions = self._counter(
                "lora_evictions", "LoRA adapters evicted from memory to make room for others.", "stoker"
            )
            self._adapter_load_seconds = self._histogram(
                "lora_load_seconds", "Duration of loading a LoRA adapter.", _SECONDS_A_LOAD, "stoker"
            )

        self._step_tokens = self._histogram("iteration_tokens_total", "Tokens per step.", _TOKENS_A_STEP)
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "Time from arrival to the first token.", _SECONDS_TO_FIRST_TOKEN
        )
        self._inter_token = self._histogram(
            "inter_token_latency_seconds", "Time between tokens of a request.", _SECONDS_A_TOKEN
        )

        # From here on: at most one observation per finished request.
        self._request_prompt_tokens = self._histogram("request_prompt_tokens", "Prompt tokens per request.", tokens)
        self._request_computed = self._histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens computed, without cached ones.", tokens
        )
        self._request_tokens = self._histogram("request_generation_tokens", "Generated tokens per request.", tokens)
        self._request_most_tokens = self._histogram(
            "request_max_num_generation_tokens", "Tokens of a request's longest output.", tokens
        )
        self._request_max_tokens = self._histogram("request_params_max_tokens", "Parameter max_tokens.", tokens)
        self._request_n = self._histogram("request_params_n", "Parameter n.", _N)
        self._request_preemptions = self._histogram("request_num_preemptions", "Preemptions per request.", _PREEMPTIONS)
        self._e2e = self._histogram("e2e_request_latency_seconds", "Time from arrival to the end.", _SECONDS)
        self._queue = self._histogram("request_queue_time_seconds", "Time from arrival to the first step.", _SECONDS)
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "Time from the first step to the first token.", _SECONDS
        )
        self._decode = self._histogram("request_decode_time_seconds", "Time from first to last token.", _SECONDS)
        self._inference = self._histogram(
            "request_inference_time_seconds", "Time from the first step to the last token.", _SECONDS
        )
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds", "Decode time per token, without the first.", _SECONDS_A_TOKEN
        )

    def show(self, info: EngineInfo) -> None:
        """Set the info gauges of the cache and the model."""
        self._show_cache_config(info)
        self._show_model(info)

    def on_step(self, report: StepReport) -> None:
        """Record a report of the engine."""
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
        _observe_all(self._inter_token, report.inter_token)
        for request in report.finished:
            self._on_finished(request)

    def _count_adapters(self, stats: AdapterStats, before: AdapterStats) -> None:
        self._adapter_loads.inc(stats.loads - before.loads)
        self._adapter_failures.inc(stats.failures - before.failures)
        self._adapter_evictions.inc(stats.evictions - before.evictions)
        for seconds in stats.load_seconds:
            self._adapter_load_seconds.observe(seconds)

    def on_death(self) -> None:
        """Reset the gauges of a dead engine. The counts in its successor's reports start from zero; Prometheus'
        counters continue."""
        self._reported = _NOTHING
        self._show(_NOTHING)

    def on_restart(self) -> None:
        """Record the start of a restart."""
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
        """Set vLLM's info gauge with the cache configuration as labels.

        Concurrency is the number of sequences of maximum length that fit into the cache; the size in tokens is their
        total length.
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
        """Set the info gauge for dtype and storage of the model, which vLLM lacks."""
        labels = {**self._labels, "dtype": info.dtype, "weights": info.weights, "kv_cache_dtype": info.kv_cache_dtype}
        self._set_info("stoker:model_info", "Dtype and storage of the model's weights and KV cache.", labels)

    def _set_info(self, name: str, help: str, labels: Mapping[str, object]) -> None:
        """Set an info gauge (always 1) with these labels, and remove its series with the engine's previous labels."""
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
    """Yield 1, 2, 5, 10, 20, 50, 100, …"""
    for exponent in itertools.count():
        for mantissa in (1, 2, 5):
            yield mantissa * 10**exponent
