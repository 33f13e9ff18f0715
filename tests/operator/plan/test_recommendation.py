"""Recommendations, the effect of Auto, and warnings."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from stoker_operator.api.v1alpha1 import Spec
from stoker_operator.plan.catalogue import Catalogue
from stoker_operator.plan.model_shapes import table
from stoker_operator.plan.options import recommended
from stoker_operator.plan.planner import Plan, Study, plan, study

from .conftest import LLAMA_8B

LLAMA_31_70B = "hf://meta-llama/Llama-3.1-70B-Instruct"
QWEN_MOE = "hf://Qwen/Qwen3-30B-A3B"
H100 = "nvidia-h100-80gb"

SpecOf = Callable[..., Spec]
Studied = Callable[..., Study]


def sizes(study: Study) -> tuple[int, ...]:
    best = recommended(study.options)
    assert best is not None
    return best.sizes


def test_recommendation_serves_the_models_length_and_does_not_merely_fit(studied: Studied) -> None:
    """TP 2 × DP 4 fits the weights and a sequence of 13,472 tokens, but the model supports 131,072."""
    assert sizes(studied(LLAMA_31_70B, H100, 8)) == (8, 1, 1)  # ten of them; three with TP 4


@pytest.mark.parametrize(
    ("floor", "length", "expected"),
    [
        (1, None, (4, 1, 2)),
        (3, None, (4, 1, 2)),
        (4, None, (8, 1, 1)),
        (10, None, (8, 1, 1)),
        (11, None, (8, 1, 1)),  # no split serves as many: the nearest
        (4, 32768, (4, 1, 2)),
        (4, 3000, (2, 1, 4)),
        (5, 3000, (4, 1, 2)),
    ],
)
def test_length_and_floor_decide_before_engines(
    studied: Studied, floor: int, length: int | None, expected: tuple[int, ...]
) -> None:
    engine = {} if length is None else {"maxModelLen": length}
    found = studied(LLAMA_31_70B, H100, 8, parallelism={"minConcurrency": floor}, **engine)
    assert sizes(found) == expected


def test_engines_that_share_nothing_are_recommended_as_pods(studied: Studied) -> None:
    advice = studied(LLAMA_8B, H100, 8).advice
    assert advice is not None
    assert (advice.count, advice.nodes, advice.replicas, advice.sizes) == (1, 1, 8, (1, 1, 1))
    found = studied(LLAMA_8B, H100, 8, parallelism={"minConcurrency": 100}).advice
    assert found is not None and (found.count, found.replicas, found.sizes) == (2, 4, (2, 1, 1))
    over_nodes = studied(LLAMA_8B, H100, 8, hardware={"nodes": 2}, parallelism={"data": 16}).advice
    assert over_nodes is not None and (over_nodes.count, over_nodes.nodes, over_nodes.replicas) == (1, 1, 16)


def test_engines_that_share_experts_stay_in_one_pod(studied: Studied) -> None:
    advice = studied(QWEN_MOE, H100, 4).advice
    assert advice is not None and not advice.apart
    assert (advice.count, advice.replicas, advice.sizes) == (4, 1, (1, 1, 4))
    # Stoker's data-parallel engines share nothing, unless they distribute whole experts.
    apart = studied(QWEN_MOE, H100, 4, runtime="stoker", image="x").advice
    assert apart is not None and apart.apart


# Auto


def test_mode_auto_equals_the_recommendation(spec: SpecOf, studied: Studied) -> None:
    for source, count in [(LLAMA_31_70B, 8), (LLAMA_8B, 8), (LLAMA_8B, 6), (QWEN_MOE, 4), (LLAMA_31_70B, 2)]:
        planned = plan(spec(source, H100, count, parallelism={"mode": "Auto"}), Catalogue.load())
        assert planned.placement.sizes == sizes(studied(source, H100, count))
        assert planned.chosen_by == "spec.parallelism.mode"


def test_mode_auto_obeys_min_concurrency(spec: SpecOf) -> None:
    tested_spec = spec(LLAMA_31_70B, H100, 8, parallelism={"mode": "Auto", "minConcurrency": 3})
    assert plan(tested_spec, Catalogue.load()).placement.sizes == (4, 1, 2)


def test_mode_auto_warns_that_separate_pods_are_better(spec: SpecOf) -> None:
    (warning,) = plan(spec(LLAMA_8B, H100, 8, parallelism={"mode": "Auto"}), Catalogue.load()).warnings
    assert "hardware.count 1 with replicas 8" in warning


def test_mode_auto_uses_all_gpus_for_tensor_without_a_shape(spec: SpecOf) -> None:
    planned = plan(spec("pvc://models/mine", H100, 8, parallelism={"mode": "Auto"}), Catalogue.load())
    assert planned.placement.sizes == (8, 1, 1)
    assert planned.unknown and planned.chosen_by


def test_mode_auto_distributes_whole_experts_if_shards_are_uneven(spec: SpecOf) -> None:
    planned = plan(spec("hf://Qwen/Qwen3-30B-A3B-FP8", H100, 8, parallelism={"mode": "Auto"}), Catalogue.load())
    assert planned.placement.expert


def test_absent_parallelism_keeps_its_meaning(spec: SpecOf) -> None:
    for parallelism in (None, {"minConcurrency": 1}, {"minConcurrency": 100}):
        planned = plan(spec(LLAMA_8B, H100, 8, parallelism=parallelism), Catalogue.load())
        assert planned.placement.sizes == (8, 1, 1)
        assert planned.max_model_len == 8192
        assert not planned.chosen_by


# Warnings


def planned(spec: SpecOf, *args: Any, **parts: Any) -> Plan:
    return plan(spec(*args, **parts), Catalogue.load())


def test_limited_length_causes_a_warning(spec: SpecOf) -> None:
    found = planned(spec, LLAMA_31_70B, H100, 2)
    (warning,) = found.warnings
    assert found.max_model_len is not None and found.max_model_len < 20_000
    assert f"limited to {found.max_model_len:,} of the model's 131,072 tokens" in warning
    assert "use 8 × nvidia-h100-80gb per engine" in warning
    (warning,) = planned(spec, LLAMA_31_70B, H100, 8, parallelism={"data": 4}).warnings
    assert "use tensor 8, data 1" in warning
    # No warning about lengths with an explicit length, nor about concurrency with a single request.
    assert not planned(spec, LLAMA_31_70B, H100, 2, maxModelLen=3000).warnings
    assert not planned(spec, LLAMA_31_70B, H100, 8).warnings


def test_limited_length_causes_a_warning_for_every_source_of_the_length(spec: SpecOf) -> None:
    for args in ([], ["--max-model-len=auto"], ["--max-num-seqs=8"]):
        assert "sequences are limited" in planned(spec, LLAMA_31_70B, H100, 2, args=args).warnings[0]
    assert "sequences are limited" in planned(spec, LLAMA_31_70B, H100, 2, parallelism={"mode": "Auto"}).warnings[0]
    memory = {"resources": {"limits": {"memory": "2320Mi"}}}
    (warning,) = planned(spec, "demo://gemma-3-270m", "cpu", hardware=memory, runtime="stoker").warnings
    assert "sequences are limited" in warning and "resources.limits.memory" in warning


def test_low_concurrency_causes_a_warning(spec: SpecOf) -> None:
    parallelism = {"tensor": 4, "data": 2}
    (warning,) = planned(spec, LLAMA_31_70B, H100, 8, parallelism=parallelism).warnings
    assert warning.startswith("an engine holds 3 of 4 sequences of 131,072 tokens at once; use tensor 8, data 1")
    assert not planned(spec, LLAMA_31_70B, H100, 8, parallelism={**parallelism, "minConcurrency": 3}).warnings


_FP8 = re.compile(
    r"set spec\.engine\.quantization to fp8, which fits with "
    r"tensor (?P<tensor>\d+)(, pipeline (?P<pipeline>\d+))?, data (?P<data>\d+)(, expert (?P<expert>\d+))?"
)


def test_offered_fp8_weights_are_accepted(studied: Studied) -> None:
    models = {id(config): name for name, config in table().items() if name.count("/") == 1}
    offered = set()
    for source in (f"hf://{name}" for name in models.values()):
        for accelerator, count in (("nvidia-l4", 4), (H100, 1)):
            parts: dict[str, Any] = {"runtime": "stoker", "image": "mine:1"}
            for violation in studied(source, accelerator, count, **parts).unplannable:
                if text := _FP8.search(violation.remedy):
                    parts |= {"parallelism": {size: int(many) for size, many in text.groupdict().items() if many}}
                    parts |= {"quantization": "fp8"}
                    assert not studied(source, accelerator, count, **parts).unplannable
                    offered.add((source, accelerator))
    assert len(offered) >= 3
    (violation,) = studied(LLAMA_31_70B, "nvidia-l4", 4, runtime="stoker", image="mine:1").unplannable
    assert "to fp8" in violation.remedy  # 8 bits fit, as GPUs store them; 8.5 would not


def test_quantized_checkpoints_are_not_offered_fp8(spec: SpecOf) -> None:
    known = table()[LLAMA_31_70B.removeprefix("hf://")]
    for method in ("gptq", "torchao"):
        config = {**known, "quantization_config": {"quant_method": method, "bits": 8, "group_size": 128}}
        found = study(spec("hf://org/model", "nvidia-l4", 2, runtime="stoker"), Catalogue.load(), config)
        assert all("to fp8" not in violation.remedy for violation in found.unplannable)
