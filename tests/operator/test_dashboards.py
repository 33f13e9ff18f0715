"""The chart's dashboards and alerts use existing metrics, and vLLM's dashboard finds all of its metrics."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.core.engine_info import EngineInfo
from stoker_engine.metrics import EngineMetrics
from stoker_engine.sizing.cache_groups import CacheGroup
from stoker_operator.process.metrics import Metrics

from .process.test_metrics import SCALING

CHART = Path(__file__).parents[2] / "charts/stoker"
#: Dashboards except the gateway's, which is tested with the gateway.
DASHBOARDS = sorted(set((CHART / "dashboards").glob("*.json")) - {CHART / "dashboards/gateway.json"})
ALERTS = [
    alert for group in yaml.safe_load((CHART / "files/alerts.yaml").read_text())["groups"] for alert in group["rules"]
]

#: Metrics in vLLM's examples/observability/prometheus_grafana/grafana.json.
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
    """Return the samples of an engine and an operator, with their labels."""
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
    EngineMetrics(registry, "a-model", EngineArgs(model="a-model"), [info])
    metrics = Metrics()
    metrics.failed(500, 0.1)
    metrics.reviewed("denied", 0.1)
    metrics.ask_endpoints(lambda: {("Ready", "True"): 1})
    metrics.ask_scaling(lambda: SCALING)
    samples: dict[str, set[str]] = {}
    for text in (generate_latest(registry).decode(), metrics.text().decode()):
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples.setdefault(sample.name, set()).update(sample.labels)
    return samples


def expressions(dashboard: Any) -> list[str]:
    found = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    queries = [each["query"] for each in dashboard["templating"]["list"] if each["type"] == "query"]
    return found + [each["query"] for each in queries]


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_panels_query_existing_metrics(path: Path, there: dict[str, set[str]]) -> None:
    dashboard = json.loads(path.read_text())
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    for expression in expressions(dashboard):
        check(expression, there)


def check(expression: str, there: dict[str, set[str]]) -> None:
    """Assert that an expression uses existing metrics, and labels that one of them has."""
    names = set(re.findall(r"\b(?:vllm:|stoker:|stoker_operator_|process_)\w+", expression))
    assert names, expression
    assert names <= set(there), expression
    by = {label for group in re.findall(r"by \(([^)]*)\)", expression) for label in re.split(r",\s*", group)}
    # Prometheus adds the first two labels to all samples that it scrapes from pods.
    known = {"namespace", "pod"}.union(*(there[name] for name in names))
    assert set(re.findall(r"(\w+)=~?\"", expression)) | by <= known, expression


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_alerts_query_existing_metrics(alert: Any, there: dict[str, set[str]]) -> None:
    assert alert.keys() >= {"alert", "expr", "labels", "annotations"}
    assert alert["labels"]["severity"] in ("critical", "warning")
    check(alert["expr"], there)
    # The message uses labels of the result: those of the sum, or those of all samples.
    summed = re.search(r"by \(([^)]*)\)", alert["expr"])
    remaining_labels = re.split(r",\s*", summed[1]) if summed else ["namespace", "pod"]
    assert set(re.findall(r"\$labels\.(\w+)", str(alert["annotations"]))) <= set(remaining_labels)


def test_alert_names_are_unique() -> None:
    assert len({alert["alert"] for alert in ALERTS}) == len(ALERTS) > 10


def test_vllms_own_dashboard_finds_its_metrics(there: dict[str, set[str]]) -> None:
    assert set(there) >= VLLMS
    assert all("model_name" in there[name] for name in VLLMS)
    assert "finished_reason" in there["vllm:request_success_total"]
