"""The metrics of a scripted history, in virtual time. Nothing is faked but the clock and who calls."""

from __future__ import annotations

import pytest
from prometheus_client import Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.core.observer import SchedulerStats, StepReport
from stoker_engine.core.request import FinishReason, Request
from stoker_engine.core.sampling_params import SamplingParams
from stoker_engine.metrics import EngineMetrics

#: vLLM 0.32's names and types, of all that applies here.
VLLM = {
    "vllm:cache_config_info": "gauge",
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:num_requests_waiting_by_reason": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:prefix_cache_queries": "counter",
    "vllm:prefix_cache_hits": "counter",
    "vllm:num_preemptions": "counter",
    "vllm:prompt_tokens": "counter",
    "vllm:prompt_tokens_by_source": "counter",
    "vllm:prompt_tokens_cached": "counter",
    "vllm:prompt_tokens_cached_by_source": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:request_success": "counter",
    "vllm:iteration_tokens_total": "histogram",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:request_time_per_output_token_seconds": "histogram",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_prefill_kv_computed_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
    "vllm:request_max_num_generation_tokens": "histogram",
    "vllm:request_params_max_tokens": "histogram",
    "vllm:request_params_n": "histogram",
    "vllm:request_num_preemptions": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
    "vllm:request_inference_time_seconds": "histogram",
}
IDLE = SchedulerStats(0, 0, 0.0, 0, 0, 0)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def metrics(clock: Clock) -> EngineMetrics:
    return EngineMetrics("tiny", EngineArgs("tiny"), max_model_len=600, num_blocks=77, clock=clock)


def families(metrics: EngineMetrics) -> dict[str, Metric]:
    text = generate_latest(metrics.registry).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(metrics: EngineMetrics, name: str, **labels: str) -> float:
    found = metrics.registry.get_sample_value(name, {"model_name": "tiny", "engine": "0", **labels})
    assert found is not None, f"no sample {name} {labels}"
    return found


def test_names_and_types_are_vllms(metrics: EngineMetrics) -> None:
    ours = {name: family.type for name, family in families(metrics).items() if name.startswith("vllm:")}
    assert {name: kind for name, kind in ours.items() if not name.endswith("_created")} == VLLM


def test_every_sample_names_model_and_engine(metrics: EngineMetrics) -> None:
    for name in VLLM.keys() - {"vllm:cache_config_info"}:
        for sample in families(metrics)[name].samples:
            assert sample.labels["model_name"] == "tiny"
            assert sample.labels["engine"] == "0"


def test_buckets_are_vllms(metrics: EngineMetrics) -> None:
    def bounds(name: str) -> list[float]:
        return [float(s.labels["le"]) for s in families(metrics)[f"vllm:{name}"].samples if "le" in s.labels][:-1]

    assert bounds("request_prompt_tokens") == [1, 2, 5, 10, 20, 50, 100, 200, 500], "up to the model's length"
    assert bounds("iteration_tokens_total")[:4] == [1, 8, 16, 32]
    assert bounds("iteration_tokens_total")[-1] == 16384
    assert bounds("time_to_first_token_seconds")[::7] == [0.001, 0.1, 7.5, 2560]
    assert bounds("inter_token_latency_seconds")[::6] == [0.01, 0.2, 2.5, 80]
    assert bounds("request_time_per_output_token_seconds") == bounds("inter_token_latency_seconds")
    assert bounds("e2e_request_latency_seconds")[::5] == [0.3, 2, 20, 120, 7680]
    assert bounds("request_params_n") == [1, 2, 5, 10, 20]


def test_the_process_is_told_too(metrics: EngineMetrics) -> None:
    assert {"process_resident_memory_bytes", "process_cpu_seconds", "python_info"} <= families(metrics).keys()


def test_cache_config(metrics: EngineMetrics) -> None:
    (sample,) = families(metrics)["vllm:cache_config_info"].samples
    assert sample.value == 1
    assert sample.labels["num_gpu_blocks"] == "77"
    assert sample.labels["block_size"] == "16"
    assert sample.labels["enable_prefix_caching"] == "True"


def test_what_the_scheduler_says(metrics: EngineMetrics) -> None:
    metrics.on_step(StepReport(0, 0, [], [], 0.0), SchedulerStats(3, 2, 0.5, 100, 40, 1))
    metrics.on_step(StepReport(0, 0, [], [], 0.0), SchedulerStats(1, 0, 0.25, 150, 60, 4))
    assert value(metrics, "vllm:num_requests_running") == 1
    assert value(metrics, "vllm:num_requests_waiting") == 0
    assert value(metrics, "vllm:num_requests_waiting_by_reason", reason="capacity") == 0
    assert value(metrics, "vllm:kv_cache_usage_perc") == 0.25
    assert value(metrics, "vllm:prefix_cache_queries_total") == 150
    assert value(metrics, "vllm:prefix_cache_hits_total") == 60
    assert value(metrics, "vllm:prompt_tokens_cached_by_source_total", source="device") == 60
    assert value(metrics, "vllm:num_preemptions_total") == 4


def test_a_requests_life(metrics: EngineMetrics, clock: Clock) -> None:
    """Arrives at 100, is scheduled at 101, has tokens at 103, 104 and 106, and is told at 107."""
    request = Request("a", list(range(20)), SamplingParams(), max_tokens=3, arrival_time=100.0)
    request.num_cached, request.scheduled_time, request.num_preemptions = 16, 101.0, 1
    times = [103.0, 104.0, 106.0]
    for number, now in enumerate(times):
        request.token_ids.append(7)
        request.first_token_time = times[0]
        request.previous_token_time, request.last_token_time = request.last_token_time, now
        finished = []
        if number == 2:
            request.finish_reason, clock.now = FinishReason.LENGTH, 107.0
            finished = [request]
        prompt = 4 if number == 0 else 0
        metrics.on_step(StepReport(prompt or 1, prompt, [request], finished, 0.1), IDLE)

    assert value(metrics, "vllm:prompt_tokens_total") == 20
    assert value(metrics, "vllm:prompt_tokens_cached_total") == 16
    assert value(metrics, "vllm:prompt_tokens_by_source_total", source="local_cache_hit") == 16
    assert value(metrics, "vllm:prompt_tokens_by_source_total", source="local_compute") == 4
    assert value(metrics, "vllm:generation_tokens_total") == 3
    assert value(metrics, "vllm:iteration_tokens_total_sum") == 5 + 1 + 1
    assert value(metrics, "vllm:request_success_total", finished_reason="length") == 1
    assert value(metrics, "vllm:request_success_total", finished_reason="stop") == 0
    expected = {
        "time_to_first_token_seconds": (1, 3),
        "inter_token_latency_seconds": (2, 1 + 2),
        "request_queue_time_seconds": (1, 1),
        "request_prefill_time_seconds": (1, 2),
        "request_decode_time_seconds": (1, 3),
        "request_inference_time_seconds": (1, 5),
        "e2e_request_latency_seconds": (1, 7),
        "request_time_per_output_token_seconds": (1, 1.5),
        "request_prompt_tokens": (1, 20),
        "request_prefill_kv_computed_tokens": (1, 4),
        "request_generation_tokens": (1, 3),
        "request_max_num_generation_tokens": (1, 3),
        "request_params_max_tokens": (1, 3),
        "request_params_n": (1, 1),
        "request_num_preemptions": (1, 1),
    }
    for name, told in expected.items():
        assert (value(metrics, f"vllm:{name}_count"), value(metrics, f"vllm:{name}_sum")) == told, name


@pytest.mark.parametrize("scheduled", [None, 101.0])
def test_an_early_abort_has_no_times_it_did_not_get_to(metrics: EngineMetrics, scheduled: float | None) -> None:
    request = Request("a", [1, 2], SamplingParams(), max_tokens=3, arrival_time=90.0)
    request.finish_reason, request.scheduled_time = FinishReason.ABORT, scheduled
    metrics.on_step(StepReport(0, 0, [], [request], 0.0), IDLE)
    assert value(metrics, "vllm:request_success_total", finished_reason="abort") == 1
    assert value(metrics, "vllm:e2e_request_latency_seconds_sum") == 10
    assert value(metrics, "vllm:request_queue_time_seconds_count") == (scheduled is not None)
    assert value(metrics, "vllm:request_prefill_time_seconds_count") == 0
    assert value(metrics, "vllm:iteration_tokens_total_count") == 0, "there was no step"
