"""The chart's dashboards ask for metrics that there are, and vLLM's own dashboard finds what it asks for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from stoker_engine.contract.cache_groups import CacheGroup
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.core.engine_info import EngineInfo
from stoker_engine.metrics import EngineMetrics
from stoker_operator.metrics import Metrics

DASHBOARDS = sorted((Path(__file__).parents[2] / "charts/stoker/dashboards").glob("*.json"))

#: What examples/observability/prometheus_grafana/grafana.json of vLLM asks for.
VLLMS = {
    "vllm:e2e_request_latency_seconds_bucket", "vllm:e2e_request_latency_seconds_sum",
    "vllm:e2e_request_latency_seconds_count", "vllm:prompt_tokens_total", "vllm:generation_tokens_total",
    "vllm:inter_token_latency_seconds_bucket", "vllm:inter_token_latency_seconds_sum",
    "vllm:inter_token_latency_seconds_count", "vllm:num_requests_running", "vllm:num_requests_waiting",
    "vllm:time_to_first_token_seconds_bucket", "vllm:time_to_first_token_seconds_sum",
    "vllm:time_to_first_token_seconds_count", "vllm:kv_cache_usage_perc", "vllm:request_prompt_tokens_bucket",
    "vllm:request_generation_tokens_bucket", "vllm:request_success_total", "vllm:request_queue_time_seconds_sum",
    "vllm:request_prefill_time_seconds_sum", "vllm:request_decode_time_seconds_sum",
    "vllm:request_max_num_generation_tokens_sum",
}  # fmt: skip


@pytest.fixture(scope="module")
def there() -> dict[str, set[str]]:
    """The samples that an engine and an operator tell of, with their labels."""
    registry = CollectorRegistry()
    info = EngineInfo(
        max_model_len=600,
        vocab_size=1000,
        num_blocks=77,
        block_size=16,
        cache_groups=(CacheGroup(None, (0, 1), 128),),
        step_tokens=2048,
        eos_token_ids=(),
        max_num_seqs=8,
        sampling_defaults={},
        max_logprobs=20,
        seed=0,
    )
    EngineMetrics(registry, "a-model", EngineArgs(model="a-model"), info)
    metrics = Metrics()
    metrics.failed(500, 0.1)
    metrics.reviewed("denied", 0.1)
    metrics.ask_endpoints(lambda: {("Ready", "True"): 1})
    samples: dict[str, set[str]] = {}
    for text in (generate_latest(registry).decode(), metrics.text().decode()):
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples.setdefault(sample.name, set()).update(sample.labels)
    return samples


def expressions(dashboard: Any) -> list[str]:
    found = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries = [each["query"] for each in dashboard["templating"]["list"] if each["type"] == "query"]
    return found + [each["query"] for each in queries]


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_panels_ask_for_what_there_is(path: Path, there: dict[str, set[str]]) -> None:
    dashboard = json.loads(path.read_text())
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    # What Prometheus adds to everything that it scrapes from pods.
    given = {"namespace", "pod"}
    for expression in expressions(dashboard):
        names = set(re.findall(r"\b(?:vllm:|stoker_operator_|process_)\w+", expression))
        assert names, expression
        assert names <= set(there), expression
        labels = set(re.findall(r"(\w+)=~?\"", expression)) | set(re.findall(r"by \((\w+)\)", expression))
        known = given.union(*(there[name] for name in names))
        assert labels <= known, expression


def test_vllms_own_dashboard_finds_what_it_asks_for(there: dict[str, set[str]]) -> None:
    assert set(there) >= VLLMS
    assert all("model_name" in there[name] for name in VLLMS)
    assert "finished_reason" in there["vllm:request_success_total"]
