"""Models that vLLM serves and our engine does not: their sums are those of transformers' own classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING

from stoker_engine.sizing.divisible import not_split
from stoker_engine.sizing.weight_sizes import weight_sizes
from stoker_operator.api.v1alpha1 import Spec
from stoker_operator.plan.catalogue import Catalogue
from stoker_operator.plan.foreign_models import foreign_config
from stoker_operator.plan.planner import plan
from stoker_operator.plan.unplannable import Unplannable

#: Transformers' type → the architecture. Encoders are counted without projectors, hence the tolerance.
COUNTED = {
    "llama4": "Llama4ForConditionalGeneration",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
    "phimoe": "PhimoeForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "apertus": "ApertusForCausalLM",
    "arcee": "ArceeForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "mistral3": "Mistral3ForConditionalGeneration",
    "llava": "LlavaForConditionalGeneration",
    "llava_onevision": "LlavaOnevisionForConditionalGeneration",
    "glm4v": "Glm4vForConditionalGeneration",
    "glm4v_moe": "Glm4vMoeForConditionalGeneration",
    "deepseek_v32": "DeepseekV32ForCausalLM",
}


@pytest.mark.parametrize("kind", COUNTED)
def test_a_model_has_as_many_weights_as_in_transformers(kind: str) -> None:
    config: Any = CONFIG_MAPPING[kind]()
    with torch.device("meta"):
        theirs = getattr(transformers, COUNTED[kind])(config)
    numbers = sum(each.numel() for each in theirs.parameters())
    found = foreign_config({**config.to_dict(), "architectures": [COUNTED[kind]]})
    assert sum(size.numbers for size in weight_sizes(found)) == pytest.approx(numbers, rel=0.035)
    text = config.get_text_config()
    assert found.num_hidden_layers == text.num_hidden_layers
    if found.layers[0].attention.latent is None:
        assert (found.num_attention_heads, found.num_key_value_heads) == (
            text.num_attention_heads,
            text.num_key_value_heads,
        )


def test_our_own_engine_does_not_serve_them(spec: Callable[..., Spec]) -> None:
    config = {**CONFIG_MAPPING["exaone4"]().to_dict(), "architectures": ["Exaone4ForCausalLM"]}
    ours = plan(spec("hf://org/m", "nvidia-h100-80gb", 1, runtime="stoker", image="x"), Catalogue.load(), config)
    assert ours.estimate is None and "Exaone4ForCausalLM is not supported" in ours.unknown
    assert plan(spec("hf://org/m", "nvidia-h200", 2), Catalogue.load(), config).estimate is not None


@pytest.mark.parametrize(
    ("count", "parallelism", "remedy"),
    [
        (2, None, "use tensor 1, pipeline 1, data 2, or another runtime"),
        (2, {"pipeline": 2}, "use tensor 1, pipeline 1, data 2, or another runtime"),
        (2, {"data": 2}, ""),
    ],
)
def test_our_own_engine_does_not_split_them(
    spec: Callable[..., Spec], count: int, parallelism: dict[str, int] | None, remedy: str
) -> None:
    config = {**CONFIG_MAPPING["exaone4"]().to_dict(), "architectures": ["Exaone4ForCausalLM"]}
    asked = spec("hf://org/m", "nvidia-h100-80gb", count, parallelism=parallelism, runtime="stoker", image="x")
    if not remedy:
        assert plan(asked, Catalogue.load(), config).unknown
        return
    with pytest.raises(Unplannable) as caught:
        plan(asked, Catalogue.load(), config)
    (violation,) = caught.value.violations
    assert (violation.field, violation.reason) == ("spec.parallelism", "NotSplit")
    assert violation.message == not_split("Exaone4ForCausalLM").message
    assert violation.remedy == remedy


@pytest.mark.parametrize(
    "change",
    [
        {"layer_types": ["linear_attention"] * 32},
        {"layer_types": 7},
        {"mamba_d_state": 16},
        {"num_hidden_layers": 10**9},
        {"hidden_size": None},
        {"vision_config": {"hidden_size": "x", "depth": -1, "mlp_ratio": "many"}},
    ],
)
def test_what_is_not_understood_is_not_known_and_runs(spec: Callable[..., Spec], change: dict[str, Any]) -> None:
    config = {**CONFIG_MAPPING["exaone4"]().to_dict(), "architectures": ["Exaone4ForCausalLM"], **change}
    planned = plan(spec("hf://org/m", "nvidia-h200", 8), Catalogue.load(), config)
    assert planned.estimate is not None or planned.unknown


def test_an_encoder_takes_its_room(spec: Callable[..., Spec]) -> None:
    made = {"architectures": ["Gemma3ForConditionalGeneration"], "vision_config": {}}
    sees = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27}
    asked = spec("hf://org/m", "nvidia-l4", 1)
    blind, seeing = (plan(asked, Catalogue.load(), {**made, "vision_config": each}).estimate for each in ({}, sees))
    assert blind and seeing
    assert seeing.weight_bytes_per_gpu - blind.weight_bytes_per_gpu == pytest.approx(2 * 411e6, rel=0.01)
