"""The page of the metrics, from the registries of the three programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from markdown_text import code, prose, table
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector

from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.core.engine_info import EngineInfo
from stoker_engine.metrics import EngineMetrics
from stoker_engine.server.middleware.http_metrics import HTTPMetricsMiddleware
from stoker_engine.sizing.cache_groups import CacheGroup
from stoker_gateway.ext_proc.metrics import PickerMetrics
from stoker_gateway.kubernetes.cluster_watch import age_gauge
from stoker_gateway.usage.metrics import UsageMetrics
from stoker_operator.process.metrics import Metrics
from stoker_operator.process.scaling_metrics import ScalingState

_HEAD = """# Metrics

This page is generated from the metrics that the programs register (`make generate`). Names are those in queries. A
histogram `NAME` has the series `NAME_bucket` (with the label `le`), `NAME_sum` and `NAME_count`; a summary has the last
two. All programs also report metrics of their process (`process_…`).
"""
_ENGINE = """## Engine

`stoker serve` reports them at `GET /metrics`. Metrics with vLLM's names have vLLM's meaning, labels and buckets, so
vLLM's dashboards and alerts work unchanged. The label `engine` is the number of the data-parallel engine. The metrics
of [LoRA adapters](../guides/lora.md) exist only with `--enable-lora`.
"""
_OPERATOR = """## Operator

`stoker operator` reports them at `/metrics` of `--health-address`. All series about endpoints come from the leader.
[Operations](../guides/operations.md#probes-metrics-logs) describes alerts and dashboards.
"""
_GATEWAY = """## Gateway

`stoker gateway` reports them at `--metrics-port`, with some of Envoy's own (`envoy_…`). The label `key` is a key's id,
or empty if no keys are needed. The [gateway's guide](../guides/gateway.md#logs-and-metrics) describes its logs.
"""


def page() -> str:
    """Return the page, in Markdown."""
    programs = ((_ENGINE, _engine()), (_OPERATOR, _operator()), (_GATEWAY, _gateway()))
    lines = [_HEAD]
    for head, registry in programs:
        lines += [head, *table(("metric", "type", "meaning (labels)"), _rows(registry))]
    return "\n".join(lines).rstrip() + "\n"


def _engine() -> CollectorRegistry:
    registry = CollectorRegistry()
    info = EngineInfo(
        max_model_len=4096,
        vocab_size=1000,
        num_blocks=100,
        block_size=16,
        cache_groups=(CacheGroup(None, (0,), 128),),
        step_tokens=2048,
        eos_token_ids=(),
        max_num_seqs=8,
        sampling_defaults={},
        max_logprobs=20,
        seed=0,
    )
    EngineMetrics(registry, "model", EngineArgs("model", enable_lora=True), [info]).look_up_adapters({})
    HTTPMetricsMiddleware(_no_app, registry)
    return registry


async def _no_app(*_: object) -> None:
    """Stands for the application behind the middleware. It is never called."""


def _operator() -> CollectorRegistry:
    metrics = Metrics()
    metrics.ask_endpoints(dict)
    metrics.ask_scaling(ScalingState)
    return metrics.registry


def _gateway() -> CollectorRegistry:
    registry = CollectorRegistry()
    PickerMetrics(registry)
    UsageMetrics(registry)
    age_gauge(registry)
    return registry


def _rows(registry: CollectorRegistry) -> Iterator[tuple[str, str, str]]:
    """Yield a row for each metric of the program itself, in the order of registration."""
    collectors: list[Collector] = list(registry._collector_to_names)
    for collector in collectors:
        for family in collector.describe() if hasattr(collector, "describe") else ():
            if family.name.startswith(("process_", "python_")):
                continue
            # The client library's own metrics know their labels; metrics of a custom collector have them in the family.
            labels: Sequence[str] = getattr(family, "_labelnames", ()) or getattr(collector, "_labelnames", ())
            meaning = prose(family.documentation)
            yield _name(family), family.type, f"{meaning} ({', '.join(map(code, labels))})" if labels else meaning


def _name(family: Metric) -> str:
    return code(f"{family.name}_total" if family.type == "counter" else family.name)
