"""Metrics after a fixed series of engine reports; only the engine is faked."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.core.engine_info import EngineInfo
from stoker_engine.core.finish_reason import FinishReason
from stoker_engine.core.step_report import AdapterStats, FinishedRequest, FirstToken, SchedulerStats, StepReport
from stoker_engine.metrics import EngineMetrics, process_registry
from stoker_engine.server.adapters.registry import AdapterState
from stoker_engine.sizing.cache_groups import CacheGroup

from ...support import golden

#: Applicable names and types of vLLM 0.32.
VLLM = {
    "vllm:cache_config_info": "gauge",
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:num_requests_waiting_by_reason": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:prefix_cache_queries": "counter",
    "vllm:prefix_cache_hits": "counter",
    "vllm:corrupted_requests": "counter",
    "vllm:num_preemptions": "counter",
    "vllm:prompt_tokens": "counter",
    "vllm:prompt_tokens_by_source": "counter",
    "vllm:prompt_tokens_cached": "counter",
    "vllm:prompt_tokens_cached_by_source": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:request_success": "counter",
    "vllm:admission_rejections": "counter",
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


INFO = EngineInfo(
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


@pytest.fixture
def registry() -> CollectorRegistry:
    return process_registry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> EngineMetrics:
    return EngineMetrics(registry, "tiny", EngineArgs("tiny"), [INFO])


def families(registry: CollectorRegistry) -> dict[str, Metric]:
    text = generate_latest(registry).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def finished(reason: FinishReason, **facts: object) -> StepReport:
    """Return a step that only reports a completed request."""
    known: dict[str, object] = {
        "n": 1,
        "max_tokens": 3,
        "num_prompt_tokens": 20,
        "num_cached_tokens": 16,
        "num_output_tokens": 3,
        "longest_output": 3,
        "num_preemptions": 0,
        "e2e": 10.0,
    }
    request = FinishedRequest("a", reason, **{**known, **facts})  # type: ignore[arg-type]
    return StepReport(0, 0, 0, IDLE, finished=[request])


def value(registry: CollectorRegistry, name: str, **labels: str) -> float:
    found = registry.get_sample_value(name, {"model_name": "tiny", "engine": "0", **labels})
    assert found is not None, f"no sample {name} {labels}"
    return found


def test_names_and_types_are_vllms(metrics: EngineMetrics, registry: CollectorRegistry) -> None:
    registered = {name: family.type for name, family in families(registry).items() if name.startswith("vllm:")}
    assert {name: kind for name, kind in registered.items() if not name.endswith("_created")} == VLLM


def test_every_sample_names_model_and_engine(metrics: EngineMetrics, registry: CollectorRegistry) -> None:
    for name in VLLM.keys() - {"vllm:cache_config_info", "vllm:admission_rejections"}:
        for sample in families(registry)[name].samples:
            assert sample.labels["model_name"] == "tiny"
            assert sample.labels["engine"] == "0"


def test_buckets_are_vllms(metrics: EngineMetrics, registry: CollectorRegistry) -> None:
    def bounds(name: str) -> list[float]:
        return [float(s.labels["le"]) for s in families(registry)[f"vllm:{name}"].samples if "le" in s.labels][:-1]

    assert bounds("request_prompt_tokens") == [1, 2, 5, 10, 20, 50, 100, 200, 500], "up to the model's length"
    assert bounds("iteration_tokens_total")[:4] == [1, 8, 16, 32]
    assert bounds("iteration_tokens_total")[-1] == 16384
    assert bounds("time_to_first_token_seconds")[::7] == [0.001, 0.1, 7.5, 2560]
    assert bounds("inter_token_latency_seconds")[::6] == [0.01, 0.2, 2.5, 80]
    assert bounds("request_time_per_output_token_seconds") == bounds("inter_token_latency_seconds")
    assert bounds("e2e_request_latency_seconds")[::5] == [0.3, 2, 20, 120, 7680]
    assert bounds("request_params_n") == [1, 2, 5, 10, 20]


def test_process_metrics_are_exported(metrics: EngineMetrics, registry: CollectorRegistry) -> None:
    assert {"process_resident_memory_bytes", "process_cpu_seconds", "python_info"} <= families(registry).keys()


def test_cache_config_info_describes_the_cache(metrics: EngineMetrics, registry: CollectorRegistry) -> None:
    (sample,) = families(registry)["vllm:cache_config_info"].samples
    assert sample.value == 1
    assert sample.labels["num_gpu_blocks"] == "77"
    assert sample.labels["block_size"] == "16"
    assert sample.labels["enable_prefix_caching"] == "True"
    assert sample.labels["kv_cache_max_concurrency"] == str(76 / 38), (
        "38 blocks hold 600 tokens, and one is the null block"
    )
    assert sample.labels["kv_cache_size_tokens"] == str(76 * 600 // 38)


def test_model_info_contains_the_storage_formats(registry: CollectorRegistry) -> None:
    info = replace(INFO, dtype="float32", weights="Q5_0, Q8_0", kv_cache_dtype="int8_per_token_head")
    EngineMetrics(registry, "a-model", EngineArgs(model="m", kv_cache_dtype="int8_per_token_head"), [info])
    (sample,) = families(registry)["stoker:model_info"].samples
    assert sample.value == 1
    assert {name: sample.labels[name] for name in ("dtype", "weights", "kv_cache_dtype")} == {
        "dtype": "float32",
        "weights": "Q5_0, Q8_0",
        "kv_cache_dtype": "int8_per_token_head",
    }
    (sample,) = families(registry)["vllm:cache_config_info"].samples
    assert sample.labels["cache_dtype"] == "int8_per_token_head"


def test_scheduler_stats_become_gauges_and_counters(metrics: EngineMetrics, registry: CollectorRegistry) -> None:
    metrics.on_step(StepReport(0, 0, 0, SchedulerStats(3, 2, 0.5, 100, 40, 1)))
    metrics.on_step(StepReport(0, 0, 0, SchedulerStats(1, 0, 0.25, 150, 60, 4)))
    assert value(registry, "vllm:num_requests_running") == 1
    assert value(registry, "vllm:num_requests_waiting") == 0
    assert value(registry, "vllm:num_requests_waiting_by_reason", reason="capacity") == 0
    assert value(registry, "vllm:kv_cache_usage_perc") == 0.25
    assert value(registry, "vllm:prefix_cache_queries_total") == 150
    assert value(registry, "vllm:prefix_cache_hits_total") == 60
    assert value(registry, "vllm:prompt_tokens_cached_by_source_total", source="device") == 60
    assert value(registry, "vllm:num_preemptions_total") == 4


@pytest.mark.parametrize("seed", range(3))
def test_values_of_one_step_are_in_the_same_buckets_as_single_ones(seed: int) -> None:
    chance = random.Random(seed)
    values = [chance.choice([0.0, 0.025, 0.3, 80, 81, chance.expovariate(1)]) for _ in range(200)]
    found = []
    for steps in ([values], [[each] for each in values]):
        registry = CollectorRegistry()
        metrics = EngineMetrics(registry, "m", EngineArgs("m"), [INFO])
        for step in steps:
            metrics.on_step(StepReport(1, 0, len(step), IDLE, inter_token=step))
        text = generate_latest(registry).decode()
        found.append([line for line in text.splitlines() if line.startswith("vllm:inter_token_latency_seconds_")])
    for line in zip(*found, strict=True):
        [(name, together), (same, single)] = (each.rsplit(" ", 1) for each in line)
        assert name == same
        if not name.startswith("vllm:inter_token_latency_seconds_created"):
            assert float(together) == pytest.approx(float(single)), name


def test_request_metrics_follow_a_requests_times(metrics: EngineMetrics, registry: CollectorRegistry) -> None:
    """The request waits 1 s, gets its first token 2 s later, and two more after 1 s and 2 s."""
    metrics.on_step(StepReport(4, 4, 1, IDLE, first_tokens=[FirstToken(3.0, 20, 16)]))
    metrics.on_step(StepReport(1, 0, 1, IDLE, inter_token=[1.0]))
    metrics.on_step(StepReport(1, 0, 1, IDLE, inter_token=[2.0]))
    metrics.on_step(finished(FinishReason.LENGTH, e2e=7.0, queue=1.0, prefill=2.0, decode=3.0, num_preemptions=1))

    assert value(registry, "vllm:prompt_tokens_total") == 20
    assert value(registry, "vllm:prompt_tokens_cached_total") == 16
    assert value(registry, "vllm:prompt_tokens_by_source_total", source="local_cache_hit") == 16
    assert value(registry, "vllm:prompt_tokens_by_source_total", source="local_compute") == 4
    assert value(registry, "vllm:generation_tokens_total") == 3
    assert value(registry, "vllm:iteration_tokens_total_sum") == 5 + 1 + 1
    assert value(registry, "vllm:request_success_total", finished_reason="length") == 1
    assert value(registry, "vllm:request_success_total", finished_reason="stop") == 0
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
    for name, reported in expected.items():
        assert (value(registry, f"vllm:{name}_count"), value(registry, f"vllm:{name}_sum")) == reported, name


@pytest.mark.parametrize("queue", [None, 1.0])
def test_an_early_abort_has_only_the_times_it_reached(
    metrics: EngineMetrics, registry: CollectorRegistry, queue: float | None
) -> None:
    metrics.on_step(finished(FinishReason.ABORT, queue=queue, num_output_tokens=0, longest_output=0))
    assert value(registry, "vllm:request_success_total", finished_reason="abort") == 1
    assert value(registry, "vllm:e2e_request_latency_seconds_sum") == 10
    assert value(registry, "vllm:request_queue_time_seconds_count") == (queue is not None)
    assert value(registry, "vllm:request_prefill_time_seconds_count") == 0
    assert value(registry, "vllm:iteration_tokens_total_count") == 0, "there was no step"


def test_metrics_cover_all_sequences_of_a_request(metrics: EngineMetrics, registry: CollectorRegistry) -> None:
    metrics.on_step(
        finished(FinishReason.STOP, n=3, num_output_tokens=12, longest_output=5, queue=0.0, prefill=1.0, decode=8.0)
    )
    assert value(registry, "vllm:request_params_n_sum") == 3
    assert value(registry, "vllm:request_generation_tokens_sum") == 12
    assert value(registry, "vllm:request_max_num_generation_tokens_sum") == 5
    assert value(registry, "vllm:request_time_per_output_token_seconds_sum") == 2


def test_rejections_have_vllms_reasons(metrics: EngineMetrics, registry: CollectorRegistry) -> None:
    metrics.on_rejected("max_num_queued_reqs")
    reported = {
        (sample.labels["model_name"], sample.labels["reason"]): sample.value
        for sample in families(registry)["vllm:admission_rejections"].samples
        if sample.name.endswith("_total")
    }
    assert reported == {("tiny", "max_num_queued_reqs"): 1, ("tiny", "max_num_queued_tokens"): 0}


def test_each_engine_has_its_own_samples(registry: CollectorRegistry) -> None:
    """One family per metric, one sample per engine. A dead engine has no running requests; others keep their values."""
    metrics = EngineMetrics(registry, "tiny", EngineArgs("tiny", data_parallel_size=3), [INFO] * 3)
    serves = [True, False, True]
    for engine in range(3):
        metrics.look_up(engine, lambda engine=engine: serves[engine])
        metrics.on_step(StepReport(4, 3, 1, SchedulerStats(engine + 1, 2, 0.5, 10, 5, 0), engine=engine))
    metrics.on_restart(1)
    serves[2] = False

    def each(name: str) -> list[float]:
        return [value(registry, name, engine=str(engine)) for engine in range(3)]

    assert each("vllm:num_requests_running") == [1, 0, 3]
    assert each("vllm:prefix_cache_hits_total") == [5, 5, 5]
    assert each("stoker:engine_restarts_total") == [0, 1, 0]
    assert each("stoker:engine_up") == [1, 0, 0]
    metrics.on_step(StepReport(4, 3, 1, SchedulerStats(1, 2, 0.5, 7, 2, 0), engine=1))
    assert each("vllm:prefix_cache_hits_total") == [5, 7, 5], "a restarted engine counts from zero"
    text = generate_latest(registry).decode()
    assert text.count("# TYPE vllm:num_requests_running gauge") == 1
    assert text.count("vllm:cache_config_info{") == text.count("stoker:model_info{") == 3


def test_info_metrics_show_the_current_cache_of_each_engine(registry: CollectorRegistry) -> None:
    """Devices may have different capacities. A dead engine's values are not shown any more."""
    infos = [INFO, replace(INFO, num_blocks=50)]
    metrics = EngineMetrics(registry, "tiny", EngineArgs("tiny", data_parallel_size=2), infos)

    def blocks() -> dict[str, str]:
        samples = families(registry)["vllm:cache_config_info"].samples
        assert [sample.value for sample in samples] == [1, 1]
        return {sample.labels["engine"]: sample.labels["num_gpu_blocks"] for sample in samples}

    assert blocks() == {"0": "77", "1": "50"}
    metrics.on_restart(1)
    metrics.on_loaded_again(replace(INFO, num_blocks=60, weights="int8"), 1)
    assert blocks() == {"0": "77", "1": "60"}
    stored = {
        sample.labels["engine"]: sample.labels["weights"] for sample in families(registry)["stoker:model_info"].samples
    }
    assert stored == {"0": "", "1": "int8"}
    metrics.on_loaded_again(infos[1], 1)
    assert blocks() == {"0": "77", "1": "50"}


def test_adapters_in_use_are_labels_of_one_series(registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in vLLM, the value is the time of the last change. All engines form one set."""
    clock = itertools.count(100)
    monkeypatch.setattr("time.time", lambda: float(next(clock)))
    args = EngineArgs("tiny", data_parallel_size=2, enable_lora=True, max_loras=3)
    metrics = EngineMetrics(registry, "tiny", args, [INFO] * 2)

    def shown() -> tuple[dict[str, str], float]:
        [sample] = families(registry)["vllm:lora_requests_info"].samples
        assert sample.labels.pop("max_lora") == "3"
        return sample.labels, sample.value

    def report(engine: int, running: tuple[str, ...], waiting: tuple[str, ...] = ()) -> None:
        stats = replace(IDLE, adapters=AdapterStats(running, waiting))
        metrics.on_step(StepReport(0, 0, 0, stats, engine=engine))

    _, first = shown()
    report(0, ("a", "b"), ("c",))
    report(1, ("b", "d"))
    labels, changed = shown()
    assert labels == {"running_lora_adapters": "a,b,d", "waiting_lora_adapters": "c"}
    assert changed > first
    report(1, ("b", "d"))
    assert shown() == (labels, changed)
    metrics.on_death(0)
    assert shown()[0] == {"running_lora_adapters": "b,d", "waiting_lora_adapters": ""}
    metrics.on_restart(1)
    assert shown()[0] == {"running_lora_adapters": "", "waiting_lora_adapters": ""}


def test_loads_of_adapters_are_counted_across_restarts(registry: CollectorRegistry) -> None:
    metrics = EngineMetrics(registry, "tiny", EngineArgs("tiny", enable_lora=True), [INFO])

    def report(loads: int, evictions: int, failures: int, *seconds: float) -> None:
        stats = AdapterStats((), (), loads, evictions, failures, seconds)
        metrics.on_step(StepReport(0, 0, 0, replace(IDLE, adapters=stats)))

    report(2, 0, 1, 0.1, 0.2)
    report(3, 1, 1, 0.3)
    metrics.on_restart()
    report(2, 0, 0, 0.4, 0.5)
    values = {sample.name: sample.value for family in families(registry).values() for sample in family.samples}
    assert values["stoker:lora_loads_total"] == 5
    assert values["stoker:lora_evictions_total"] == 1
    assert values["stoker:lora_load_failures_total"] == 1
    assert values["stoker:lora_load_seconds_count"] == 5
    assert values["stoker:lora_load_seconds_sum"] == pytest.approx(1.5)


def test_a_server_without_adapters_has_none_of_their_metrics(
    registry: CollectorRegistry, metrics: EngineMetrics
) -> None:
    metrics.on_step(StepReport(0, 0, 0, IDLE))
    assert not [name for name in families(registry) if "lora" in name]


def test_golden_metrics(registry: CollectorRegistry) -> None:
    """Every series of a server with two engines, after requests with each finish reason."""
    args = EngineArgs("tiny", data_parallel_size=2, enable_lora=True)
    metrics = EngineMetrics(registry, "tiny", args, [INFO] * 2)
    metrics.look_up_adapters({state: lambda: 1 for state in AdapterState})
    for engine in range(2):
        metrics.look_up(engine, lambda: True)
        metrics.on_step(StepReport(4, 4, 1, SchedulerStats(1, 1, 0.5, 100, 40, 1), engine=engine))
    for reason in FinishReason:
        facts = finished(reason, queue=1.0, prefill=1.0, decode=1.0)
        metrics.on_step(replace(facts, stats=SchedulerStats(1, 1, 0.5, 100, 40, 1)))
    metrics.on_rejected("max_num_queued_reqs")
    metrics.on_restart(1)
    golden.check("engine-metrics.txt", golden.series(generate_latest(registry).decode(), ("vllm:", "stoker:")))
