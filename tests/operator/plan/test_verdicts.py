"""What the planner refuses: each with its reason, field, and a valid remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from stoker_operator.api.v1alpha1 import Spec
from stoker_operator.api.violation import Refused, Violation
from stoker_operator.plan.catalogue import Catalogue, Release
from stoker_operator.plan.model_shapes import table
from stoker_operator.plan.planner import Study, Unplannable, plan, study

from .conftest import LLAMA_8B, LLAMA_70B, MISTRAL_7B

QWEN_05B = "hf://Qwen/Qwen2.5-0.5B-Instruct"  # 14 heads, 2 KV heads
QWEN_MOE = "hf://Qwen/Qwen3-30B-A3B"
QWEN_FP8 = "hf://Qwen/Qwen3-8B-FP8"
QWEN_AWQ = "hf://Qwen/Qwen2.5-72B-Instruct-AWQ"
LLAMA_31_8B = "hf://meta-llama/Llama-3.1-8B-Instruct"

#: Bytes of all tensors of the demo model's file, by the gguf library. Its norms are float32, as always for Gemma.
DEMO_BYTES = 246_587_904

SpecOf = Callable[..., Spec]


def refused(spec: Spec, config: dict[str, Any] | None = None) -> tuple[Violation, ...]:
    with pytest.raises(Refused) as caught:
        plan(spec, Catalogue.load(), config)
    for violation in caught.value.violations:
        assert violation.field.startswith("spec.")
        assert violation.remedy
    return caught.value.violations


def test_default_that_heads_do_not_allow_names_recommended_sizes(spec: SpecOf) -> None:
    (violation,) = refused(spec(QWEN_05B, "nvidia-l4", 8))
    assert str(violation) == (
        "spec.parallelism: tensor 8 does not divide the model's 14 attention heads; "
        "use tensor 1, data 8 (recommended; better as hardware.count 1, replicas 8) or tensor 2, data 4"
    )
    assert violation.reason == "HeadsNotDivisible"
    assert plan(spec(QWEN_05B, "nvidia-l4", 8, parallelism={"data": 8}), Catalogue.load())


def test_kv_heads_are_divided_or_replicated(spec: SpecOf) -> None:
    qwen = "hf://Qwen/Qwen2.5-7B-Instruct"  # 28 heads, 4 KV heads
    sizes = {"tensor": 7, "data": 1}
    (violation,) = refused(spec(qwen, "nvidia-l4", 7, parallelism=sizes))
    assert violation.message == "tensor 7 neither divides the model's 4 key-value heads nor is a multiple of them"
    assert violation.reason == "KVHeadsNotDivisible"
    phi = "hf://microsoft/Phi-3-medium-4k-instruct"  # 40 heads, 10 KV heads
    assert plan(spec(phi, "nvidia-l4", 20, parallelism={"tensor": 20}), Catalogue.load())


def test_tensor_stays_within_a_node(studied: Callable[..., Study]) -> None:
    found = studied(LLAMA_8B, "nvidia-l4", 4, hardware={"nodes": 2}, parallelism={"tensor": 4, "data": 2})
    assert all(way.sizes.tensor <= 4 for way in found.options)
    assert not found.unplannable


def test_a_stage_needs_a_layer(spec: SpecOf) -> None:
    gpt2 = "hf://openai-community/gpt2"
    (violation,) = refused(spec(gpt2, "nvidia-l4", 16, parallelism={"pipeline": 16}))
    assert violation.message == "pipeline 16 is more than the model's 12 layers"
    assert violation.reason == "TooFewLayers"


def test_replicas_of_several_pods_are_computed_and_not_run(studied: Callable[..., Study], spec: SpecOf) -> None:
    parts = {"hardware": {"nodes": 2}, "parallelism": {"tensor": 8, "pipeline": 2}}
    assert not studied(LLAMA_70B, "nvidia-l40s", 8, **parts).unplannable
    (violation,) = refused(spec(LLAMA_70B, "nvidia-l40s", 8, **parts))
    assert (violation.field, violation.reason) == ("spec.hardware.nodes", "NotSupported")


@pytest.mark.parametrize(
    ("source", "parallelism", "reason", "remedy"),
    [
        (LLAMA_8B, {"tensor": 4, "expert": 4}, "NotMixtureOfExperts", "remove it"),
        (QWEN_MOE, {"tensor": 2, "expert": 2}, "ExpertMismatch", "use 4, or remove it to split each expert"),
    ],
)
def test_experts_are_spread_over_tensor_and_data(
    spec: SpecOf, source: str, parallelism: dict[str, int], reason: str, remedy: str
) -> None:
    (violation,) = refused(spec(source, "nvidia-a100-80gb", 4, parallelism=parallelism))
    assert (violation.field, violation.reason) == ("spec.parallelism.expert", reason)
    assert violation.remedy.startswith(remedy)


def test_spread_experts_are_planned(spec: SpecOf) -> None:
    sizes = {"tensor": 2, "data": 2, "expert": 4}
    spread = plan(spec(QWEN_MOE, "nvidia-a100-80gb", 4, parallelism=sizes), Catalogue.load())
    split = plan(
        spec(QWEN_MOE, "nvidia-a100-80gb", 4, parallelism={"tensor": 2}, runtime="stoker", image="x"),
        Catalogue.load(),
    )
    assert spread.placement.expert and not split.placement.expert
    assert spread.estimate and split.estimate
    # 30.5 billion weights, of which 29 billion are experts': each GPU has a quarter of these instead of half.
    assert spread.estimate.weight_bytes_per_gpu < 0.6 * split.estimate.weight_bytes_per_gpu


@pytest.mark.parametrize(
    ("accelerator", "engine", "field", "reason", "remedy"),
    [
        ("nvidia-t4", {"dtype": "bfloat16"}, "dtype", "UnsupportedDtype", "use float32 or float16"),
        ("nvidia-t4", {"kvCacheDtype": "fp8"}, "kvCacheDtype", "UnsupportedKVCacheDtype", "use auto"),
        ("nvidia-h100-80gb", {"quantization": "bitsandbytes"}, "quantization", "UnsupportedQuantization", "use fp8 or"),
        ("amd-mi300x", {"quantization": "gptq_marlin"}, "quantization", "UnsupportedQuantization", "use fp8 or"),
        ("nvidia-h100-80gb", {"quantization": "awq"}, "quantization", "QuantizationMismatch", "remove it, or name a"),
        ("nvidia-l4", {"maxModelLen": 8193}, "maxModelLen", "MaxModelLenTooLong", "use at most 8192"),
    ],
)
def test_unsupported_engine_settings_are_refused_with_a_remedy(
    spec: SpecOf, accelerator: str, engine: dict[str, Any], field: str, reason: str, remedy: str
) -> None:
    found = {violation.reason: violation for violation in refused(spec(LLAMA_8B, accelerator, 1, **engine))}
    assert found[reason].field == f"spec.engine.{field}"
    assert found[reason].remedy.startswith(remedy)


def test_unsupported_checkpoint_names_formats_and_runtimes_that_would_work(spec: SpecOf) -> None:
    config = {**table()["Qwen/Qwen3-8B"], "quantization_config": {"quant_method": "torchao"}}
    (violation,) = refused(spec("hf://org/model", "cpu", runtime="stoker"), config)
    assert (violation.field, violation.reason) == ("spec.model.source", "UnsupportedQuantization")
    assert violation.message == "the checkpoint is quantized by torchao, which runtime stoker does not load on cpu"
    assert violation.remedy.startswith("use the unquantized model, or use one quantized by awq, auto_awq, ")
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    tested_spec, catalogue = spec("hf://org/model", "nvidia-h100-80gb", 1), Catalogue.load()
    images = {**catalogue.runtimes, "stoker": {"cuda": "mine:1"}}
    has_image = catalogue.model_copy(update={"runtimes": images})
    (violation,) = study(tested_spec, has_image, config).unplannable
    assert violation.remedy.endswith(", or use runtime: stoker")
    # Another runtime without an image, or without support for the file, is not recommended.
    (violation,) = study(tested_spec, catalogue, config).unplannable
    assert "runtime: stoker" not in violation.remedy
    del config["quantization_config"]["load_in_8bit"]
    (violation,) = study(tested_spec, has_image, config).unplannable
    assert "runtime: stoker" not in violation.remedy


@pytest.mark.parametrize("quantization", [None, "int8", "fp8"])
def test_unsupported_checkpoint_is_refused_with_any_quantization(spec: SpecOf, quantization: str | None) -> None:
    config = {**table()["Qwen/Qwen3-8B"], "quantization_config": {"quant_method": "quark"}}
    (violation,) = refused(spec("hf://org/model", "cpu", runtime="stoker", quantization=quantization), config)
    assert (violation.field, violation.reason) == ("spec.model.source", "UnsupportedQuantization")
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (violation,) = refused(spec("hf://org/model", "nvidia-h100-80gb", 1, quantization="fp8"), config)
    assert violation.reason == "QuantizationMismatch"  # one objection, not two


def test_fp8_e5m2_cache_is_refused_if_the_checkpoint_has_kv_scales(spec: SpecOf) -> None:
    stated: dict[str, Any] = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}}
    config = {**table()["Qwen/Qwen3-8B"], "quantization_config": stated}

    def reasons(scheme: Any, dtype: str | None, runtime: str = "stoker") -> list[str]:
        stated["kv_cache_scheme"] = scheme
        tested_spec = spec("hf://org/model", "nvidia-h100-80gb", 1, runtime=runtime, image="mine:1", kvCacheDtype=dtype)
        return [each.reason for each in study(tested_spec, Catalogue.load(), config).unplannable]

    scales = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    assert reasons(scales, "fp8_e5m2") == ["UnsupportedKVCacheDtype"]
    assert reasons(scales, "fp8") == reasons(scales, None) == reasons(scales, "fp8_e5m2", "vllm") == []
    for without in (None, {}, "fp8", {**scales, "dynamic": True}):
        assert reasons(without, "fp8_e5m2") == []


@pytest.mark.parametrize(
    ("model", "quantization", "message", "remedy"),
    [
        (QWEN_05B, "gptq", "gptq needs a checkpoint that is quantized by it", "or use a method that quantizes on load"),
        (QWEN_05B, "bitsandbytes", "bitsandbytes needs a checkpoint", "on load, int8 or int4 or fp8"),
        (QWEN_FP8, "int8", "int8 is requested, but the checkpoint is quantized by fp8", "remove it, or name another"),
        ("demo://gemma-3-270m", "int4", "int4 is requested, but the file is quantized already: its", "remove"),
    ],
)
def test_unsupported_quantization_on_load_is_refused(
    spec: SpecOf, model: str, quantization: str, message: str, remedy: str
) -> None:
    (violation,) = refused(spec(model, "cpu", runtime="stoker", quantization=quantization))
    assert (violation.field, violation.reason) == ("spec.engine.quantization", "QuantizationMismatch")
    assert violation.message.startswith(message)
    assert remedy in violation.remedy


def test_quantization_that_differs_from_the_checkpoints_is_refused(spec: SpecOf) -> None:
    (violation,) = refused(spec(QWEN_AWQ, "nvidia-h100-80gb", 1, quantization="gptq"))
    assert violation.reason == "QuantizationMismatch"
    assert plan(spec(QWEN_AWQ, "nvidia-h100-80gb", 1, quantization="awq_marlin"), Catalogue.load())
    assert plan(spec(QWEN_AWQ, "nvidia-h100-80gb", 1), Catalogue.load())


# Lengths


@pytest.mark.parametrize(("runtime", "margin"), [("stoker", 0.03), ("vllm", 0.1)])
def test_absent_length_becomes_the_largest_that_fits(spec: SpecOf, runtime: str, margin: float) -> None:
    planned = plan(spec(LLAMA_31_8B, "nvidia-l4", 1, runtime=runtime, image="x"), Catalogue.load())
    assert planned.estimate
    assert planned.max_model_len == planned.estimate.max_model_len
    assert planned.max_model_len is not None and 2048 < planned.max_model_len < 131072
    # All available memory, less the error margin of a GPU prediction. The engine's graphs are planned again for this
    # length, and leave some more.
    assert planned.estimate.kv_tokens_per_copy is not None
    assert planned.max_model_len / planned.estimate.kv_tokens_per_copy == pytest.approx(1 - margin, abs=0.005)
    assert planned.estimate.max_concurrency == 1


def test_absent_length_is_at_most_the_models(spec: SpecOf) -> None:
    assert plan(spec(LLAMA_31_8B, "nvidia-h100-80gb", 1), Catalogue.load()).max_model_len == 131072
    assert plan(spec(LLAMA_8B, "nvidia-h100-80gb", 1), Catalogue.load()).max_model_len == 8192


def test_length_that_does_not_fit_is_refused_with_one_that_does(spec: SpecOf) -> None:
    (violation,) = refused(spec(LLAMA_31_8B, "nvidia-l4", 1, maxModelLen=100_000))
    assert (violation.field, violation.reason) == ("spec.engine.maxModelLen", "MaxModelLenDoesNotFit")
    length = int(violation.remedy.split()[3].rstrip(";"))
    assert f"{length:,} tokens" in violation.message
    assert plan(spec(LLAMA_31_8B, "nvidia-l4", 1, maxModelLen=length), Catalogue.load()).max_model_len == length
    refused(spec(LLAMA_31_8B, "nvidia-l4", 1, maxModelLen=length + 16))


def test_less_than_2048_tokens_are_refused(spec: SpecOf) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 42,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "vocab_size": 32000,
        "max_position_embeddings": 32768,
        "torch_dtype": "bfloat16",
    }
    source = "hf://org/unknown"
    layers = next(layers for layers in range(30, 60) if not _fits(spec(source, "nvidia-h100-80gb", 1), config, layers))
    (violation,) = refused(spec(source, "nvidia-h100-80gb", 1), {**config, "num_hidden_layers": layers})
    assert violation.reason == "DoesNotFit"
    # A model with a shorter context may have less.
    short = {**config, "num_hidden_layers": layers - 1, "max_position_embeddings": 512}
    assert plan(spec(source, "nvidia-h100-80gb", 1), Catalogue.load(), short).max_model_len == 512


def _fits(spec: Spec, config: dict[str, Any], layers: int) -> bool:
    try:
        planned = plan(spec, Catalogue.load(), {**config, "num_hidden_layers": layers})
    except Unplannable:
        return False
    assert planned.max_model_len is not None and planned.max_model_len >= 2048
    return True


@pytest.mark.parametrize(
    ("args", "length"),
    [(["--max-model-len=1024"], 1024), (["--max-model-len", "1024"], 1024), (["--max-model-len=auto"], None)],
)
def test_argument_may_set_the_length(spec: SpecOf, args: list[str], length: int | None) -> None:
    assert plan(spec(LLAMA_8B, "nvidia-h100-80gb", 1, args=args), Catalogue.load()).max_model_len == length


# CPU: the memory is the container's limit


def test_memory_limit_of_the_container_is_the_memory(spec: SpecOf) -> None:
    def planned(memory: Any) -> Any:
        limits = {"resources": {"limits": {"memory": memory}}}
        return plan(spec("demo://gemma-3-270m", "cpu", hardware=limits, runtime="stoker"), Catalogue.load()).estimate

    assert planned("5Gi").kv_tokens_per_copy > planned("4Gi").kv_tokens_per_copy
    assert planned("4Gi") == planned(4 * 1024**3)
    with pytest.raises(Unplannable) as caught:
        planned("1Gi")
    (violation,) = caught.value.violations
    assert violation.field == "spec.hardware.resources.limits.memory"
    enough = violation.remedy.split()[3]
    assert planned(enough).max_model_len >= 2048


def test_memory_is_unknown_without_a_limit(spec: SpecOf) -> None:
    resources = {"resources": {"requests": {"memory": "1Gi"}}}
    planned = plan(spec("demo://gemma-3-270m", "cpu", hardware=resources, runtime="stoker"), Catalogue.load())
    assert planned.estimate is not None
    assert planned.estimate.weight_bytes_per_gpu == DEMO_BYTES
    assert (planned.estimate.kv_blocks, planned.max_model_len) == (None, None)


def test_gguf_blocks_count_only_where_kernels_compute_with_them(spec: SpecOf) -> None:
    for dtype in ("float32", "bfloat16"):
        found = plan(spec("demo://gemma-3-270m", "cpu", 1, dtype=dtype, runtime="stoker"), Catalogue.load())
        assert found.estimate is not None
        assert found.estimate.weight_bytes_per_gpu == DEMO_BYTES
    engine = {"runtime": "stoker", "image": "registry.example/engine:1"}
    for dtype in ("float32", "bfloat16", "float16"):
        on_gpu = plan(spec("demo://gemma-3-270m", "nvidia-l4", 1, dtype=dtype, **engine), Catalogue.load()).estimate
        # Norms have the model's dtype.
        assert on_gpu is not None and DEMO_BYTES * 0.999 < on_gpu.weight_bytes_per_gpu <= DEMO_BYTES
    estimates = [
        plan(spec(model, "cpu", 1, dtype="float16", **engine), Catalogue.load()).estimate
        for model in ("hf://google/gemma-3-270m", "demo://gemma-3-270m")
    ]
    assert estimates[0] == estimates[1] is not None


# What is not known, and what is no decoder


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("pvc://models/mine", "the model on a claim"),
        ("hf://org/unknown", "has not been fetched"),
        ("file:///models/mine", "the model of this file:// source"),
    ],
)
def test_unknown_shape_never_blocks(spec: SpecOf, source: str, why: str) -> None:
    planned = plan(spec(source, "nvidia-h100-80gb", 8), Catalogue.load())
    assert planned.estimate is None
    assert why in planned.unknown
    assert planned.placement.sizes == (8, 1, 1)
    assert planned.max_model_len is None


def test_undescribed_architecture_is_unknown(spec: SpecOf) -> None:
    config = {"architectures": ["MambaForCausalLM"], "hidden_size": 8}
    planned = plan(spec("hf://org/unknown", "nvidia-h100-80gb", 1), Catalogue.load(), config)
    assert planned.estimate is None
    assert "MambaForCausalLM" in planned.unknown


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"architectures": ["BertForMaskedLM"]}, "an encoder that fills masks"),
        ({"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}, "an encoder-decoder"),
        ({"architectures": ["ViTForImageClassification"]}, "an image model"),
        ({"architectures": ["CLIPModel"]}, "without a language-model head"),
    ],
)
def test_models_that_are_no_decoders_are_refused(spec: SpecOf, config: dict[str, Any], reason: str) -> None:
    (violation,) = refused(spec("hf://org/unknown", "nvidia-h100-80gb", 1), config)
    assert (violation.field, violation.reason) == ("spec.model.source", "NoDecoder")
    assert reason in violation.message and "not an autoregressive decoder" in violation.message


def test_fetched_config_overrides_the_table(spec: SpecOf) -> None:
    config = {"architectures": ["BertForMaskedLM"]}
    with pytest.raises(Unplannable):
        plan(spec(LLAMA_8B, "nvidia-h100-80gb", 1), Catalogue.load(), config)


# Catalogue matters are no matter of fit


def test_missing_image_is_refused_before_sizes(spec: SpecOf) -> None:
    with pytest.raises(Refused) as caught:
        plan(spec(QWEN_05B, "nvidia-l4", 8, runtime="stoker"), Catalogue.load())
    assert not isinstance(caught.value, Unplannable)
    assert caught.value.violations[0].reason == "NoImage"


def test_limits_of_the_release_cause_warnings(spec: SpecOf) -> None:
    tested_spec = spec(
        LLAMA_8B, "nvidia-h100-80gb", 4, runtime="stoker", image="x", kvCacheDtype="fp8", quantization="fp8"
    )
    assert not plan(tested_spec, Catalogue.load()).warnings
    on_cpus = Release.model_validate({"quantizedOn": ["cpu"]})
    catalogue = Catalogue.load().model_copy(update={"releases": {"stoker": on_cpus}})
    assert plan(tested_spec, catalogue).warnings == (
        "the stoker engine of this release has no kernels for weights quantized by fp8 on nvidia-h100-80gb: it "
        "dequantizes them in every step, which is slow; use runtime vllm",
    )
    older = Release.model_validate({"devices": 1, "kvCacheDtypes": ["auto"], "quantizations": []})
    catalogue = Catalogue.load().model_copy(update={"releases": {"stoker": older}})
    assert [
        warning.partition("release ")[2].partition(",")[0] for warning in plan(tested_spec, catalogue).warnings
    ] == [
        "supports 1 accelerator",
        "does not support a KV cache of fp8",
        "does not load weights quantized by fp8",
    ]
    ranks = plan(spec(QWEN_05B, "cpu", runtime="stoker", parallelism={"tensor": 2}), catalogue).warnings
    assert ["supports 1 rank, not 2" in warning for warning in ranks] == [True]
    assert not plan(spec(LLAMA_8B, "nvidia-h100-80gb", 4, kvCacheDtype="fp8"), Catalogue.load()).warnings
    assert not plan(spec(QWEN_05B, "cpu", runtime="stoker", quantization="int8"), Catalogue.load()).warnings
    assert not plan(spec("demo://gemma-3-270m", "cpu", runtime="stoker"), Catalogue.load()).warnings


def test_all_faults_are_reported_at_once(spec: SpecOf) -> None:
    tested_spec = spec(MISTRAL_7B, "nvidia-t4", 1, dtype="bfloat16", kvCacheDtype="fp8", maxModelLen=100_000)
    reasons = [violation.reason for violation in refused(tested_spec)]
    assert reasons == ["UnsupportedDtype", "UnsupportedKVCacheDtype", "MaxModelLenTooLong", "DoesNotFit"]
