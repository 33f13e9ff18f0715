"""Uneven shards are refused with sizes that divide; the engine would fail only while loading."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from stoker_operator.api.v1alpha1 import Spec
from stoker_operator.plan.catalogue import Catalogue
from stoker_operator.plan.model_shapes import table
from stoker_operator.plan.planner import Study, Unplannable, plan

H100 = "nvidia-h100-80gb"
QWEN_FP8 = "hf://Qwen/Qwen3-30B-A3B-FP8"  # experts of 768, by blocks of 128 × 128
#: Shape of AutoAWQ's Qwen2.5-72B before its inner size was padded to 29,696 for this reason.
AWQ = {
    **table()["Qwen/Qwen2.5-72B-Instruct"],
    "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128},
}

SpecOf = Callable[..., Spec]


def refusal(spec: Spec, config: Any = None) -> Any:
    with pytest.raises(Unplannable) as caught:
        plan(spec, Catalogue.load(), config)
    (violation,) = caught.value.violations
    return violation


@pytest.mark.parametrize(("count", "part"), [(4, 192), (8, 96)])
def test_experts_whose_blocks_do_not_divide_are_refused(spec: SpecOf, count: int, part: int) -> None:
    """Regression test of vLLM's issue 25292."""
    violation = refusal(spec(QWEN_FP8, H100, count))
    assert (violation.field, violation.reason) == ("spec.parallelism", "ExpertsNotDivisible")
    assert violation.message == (
        f"tensor {count} splits each expert's inner size, 768, into {count} parts of {part}, which is not a multiple "
        "of fp8's block size, 128 (1 or 2 would work)"
    )
    assert f"expert {count}" in violation.remedy


def test_sizes_that_divide_are_accepted(spec: SpecOf) -> None:
    for count in (1, 2):
        assert plan(spec(QWEN_FP8, H100, count), Catalogue.load()).placement.tensor == count
    for count in (4, 8):
        whole = {"tensor": count, "expert": count}
        assert plan(spec(QWEN_FP8, H100, count, parallelism=whole), Catalogue.load()).placement.expert
        unquantized = spec("hf://Qwen/Qwen3-30B-A3B", H100, count)
        assert plan(unquantized, Catalogue.load()).placement.tensor == count


def test_vllm_splits_experts_over_the_accelerators_of_all_engines(spec: SpecOf) -> None:
    """Its data-parallel ranks are one tensor-parallel group to the experts (``flatten_tp_across_dp``)."""
    violation = refusal(spec(QWEN_FP8, H100, 4, parallelism={"tensor": 1, "data": 4}))
    assert violation.message.startswith("tensor 1 × data 4 splits each expert's inner size, 768, into 4 parts of 192")


@pytest.mark.parametrize("tensor", [2, 4, 8])
@pytest.mark.parametrize("method", ["awq", "gptq", "compressed-tensors"])
def test_quantization_groups_that_do_not_divide_are_refused(spec: SpecOf, tensor: int, method: str) -> None:
    stated: dict[str, Any] = {"quant_method": method, "bits": 4, "group_size": 128}
    if method == "compressed-tensors":
        stated["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 128}}}
    config = {**AWQ, "quantization_config": stated}
    violation = refusal(spec("hf://org/awq", H100, tensor), config)
    assert violation.reason == "ShardsNotDivisible"
    assert f"29,568, into {tensor} parts of {29568 // tensor:,}, which is not a multiple of " in violation.message
    assert "(1 would work)" in violation.message
    assert violation.remedy.startswith(f"use tensor 1, data {tensor} (recommended; better as hardware.count 1")


def test_padded_checkpoint_divides(spec: SpecOf) -> None:
    for tensor in (1, 2, 4, 8):
        assert plan(spec("hf://Qwen/Qwen2.5-72B-Instruct-AWQ", H100, tensor), Catalogue.load())


def test_scales_of_whole_rows_divide_like_rows(spec: SpecOf) -> None:
    stated = {"quant_method": "gptq", "bits": 4, "group_size": -1}
    assert plan(spec("hf://org/m", H100, 8), Catalogue.load(), {**AWQ, "quantization_config": stated})


def test_inner_size_that_does_not_divide_is_refused(spec: SpecOf) -> None:
    config = {**table()["Qwen/Qwen3-8B"], "intermediate_size": 12_290}
    violation = refusal(spec("hf://org/m", H100, 4), config)
    assert (
        violation.message
        == "tensor 4 splits the MLP's inner size, 12,290, into 4 parts of unequal size (1 or 2 would work)"
    )
    assert plan(spec("hf://org/m", H100, 2), Catalogue.load(), config)


def test_deepseek_in_blocks_is_accepted_in_its_published_layouts(spec: SpecOf, studied: Callable[..., Study]) -> None:
    """Eight H200 with TP 8, or with data and expert parallelism over eight: both are vLLM's recipes."""
    deepseek = "hf://deepseek-ai/DeepSeek-V3"
    assert plan(spec(deepseek, "nvidia-h200", 8), Catalogue.load()).placement.tensor == 8
    dealt = {"tensor": 1, "data": 8, "expert": 8}
    assert not studied(deepseek, "nvidia-h200", 8, parallelism=dealt).unplannable


@pytest.mark.parametrize(
    ("stated", "problem"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, ""),
        ({"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": True}, "uint4 in groups of 64"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 64}, ""),
    ],
)
def test_stoker_cuts_rows_only_between_groups(spec: SpecOf, stated: dict[str, Any], problem: str) -> None:
    """7,424 columns in four parts: 29 groups of 64 each, or 15, 15, 15 and 13 of 128. Outputs are cut anywhere."""
    config = {**AWQ, "hidden_size": 4096, "intermediate_size": 7424, "quantization_config": stated}
    config |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    tested_spec = spec("hf://org/m", H100, 4, runtime="stoker", image="registry.example/engine:1")
    if not problem:
        assert plan(tested_spec, Catalogue.load(), config).placement.tensor == 4
        return
    with pytest.raises(Unplannable) as caught:
        plan(tested_spec, Catalogue.load(), config)
    assert any(f"as {problem}" in str(each) for each in caught.value.violations)
