"""Models that only vLLM serves: predicted sizes equal those of transformers' classes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING

from stoker_common.model_source import ModelSource
from stoker_engine.sizing.sharding import not_split
from stoker_engine.sizing.weight_sizes import weight_bytes, weight_sizes
from stoker_operator.api.v1alpha1 import Spec
from stoker_operator.plan.catalogue import Catalogue
from stoker_operator.plan.foreign_models import foreign_config
from stoker_operator.plan.model_shapes import Shape, shape_of, table
from stoker_operator.plan.planner import plan, study
from stoker_operator.plan.unplannable import Unplannable

#: Architecture by transformers' type. Encoders are counted without projectors, hence the tolerance.
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
def test_weight_counts_equal_those_of_transformers(kind: str) -> None:
    config: Any = CONFIG_MAPPING[kind]()
    with torch.device("meta"):
        transformers_model = getattr(transformers, COUNTED[kind])(config)
    numbers = sum(each.numel() for each in transformers_model.parameters())
    found = foreign_config({**config.to_dict(), "architectures": [COUNTED[kind]]})
    assert sum(size.numbers for size in weight_sizes(found)) == pytest.approx(
        numbers, rel=0.01 if kind.startswith("qwen") else 0.035
    )
    text = config.get_text_config()
    assert found.num_hidden_layers == text.num_hidden_layers
    if found.layers[0].attention.latent is None:
        assert (found.num_attention_heads, found.num_key_value_heads) == (
            text.num_attention_heads,
            text.num_key_value_heads,
        )


def test_stoker_does_not_support_models_of_vllm(spec: Callable[..., Spec]) -> None:
    config = {**CONFIG_MAPPING["exaone4"]().to_dict(), "architectures": ["Exaone4ForCausalLM"]}
    stoker_plan = plan(spec("hf://org/m", "nvidia-h100-80gb", 1, runtime="stoker", image="x"), Catalogue.load(), config)
    assert stoker_plan.estimate is None and "Exaone4ForCausalLM is not supported" in stoker_plan.unknown
    assert plan(spec("hf://org/m", "nvidia-h200", 2), Catalogue.load(), config).estimate is not None


@pytest.mark.parametrize(
    ("count", "parallelism", "remedy"),
    [
        (2, None, "use tensor 1, pipeline 1, data 2, or use runtime: vllm"),
        (2, {"pipeline": 2}, "use tensor 1, pipeline 1, data 2, or use runtime: vllm"),
        (2, {"data": 2}, ""),
    ],
)
def test_stoker_does_not_split_models_of_vllm(
    spec: Callable[..., Spec], count: int, parallelism: dict[str, int] | None, remedy: str
) -> None:
    config = {**CONFIG_MAPPING["exaone4"]().to_dict(), "architectures": ["Exaone4ForCausalLM"]}
    tested_spec = spec("hf://org/m", "nvidia-h100-80gb", count, parallelism=parallelism, runtime="stoker", image="x")
    if not remedy:
        assert plan(tested_spec, Catalogue.load(), config).unknown
        return
    with pytest.raises(Unplannable) as caught:
        plan(tested_spec, Catalogue.load(), config)
    (violation,) = caught.value.violations
    assert (violation.field, violation.reason) == ("spec.parallelism", "NotSplit")
    assert violation.message == not_split("Exaone4ForCausalLM").message
    assert violation.remedy == remedy


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("name", ["deepseek-ai/DeepSeek-R1", "MiniMaxAI/MiniMax-M2", "exaone4"])
@pytest.mark.parametrize(("accelerator", "count"), [("nvidia-h100-80gb", 8), ("nvidia-h100-80gb", 2), ("nvidia-l4", 4)])
def test_remedies_for_unsplit_models_are_possible(
    spec: Callable[..., Spec], name: str, accelerator: str, count: int, quantized: bool
) -> None:
    config = dict(CONFIG_MAPPING[name]().to_dict() if name == "exaone4" else table()[name])
    architecture = {"deepseek-ai/DeepSeek-R1": "DeepseekV32ForCausalLM", "exaone4": "Exaone4ForCausalLM"}.get(name)
    config |= {"architectures": [architecture]} if architecture else {}
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]} if quantized else None
    tested_spec = spec("hf://org/m", accelerator, count, runtime="stoker", image="x")
    with pytest.raises(Unplannable) as caught:
        plan(tested_spec, Catalogue.load(), config)
    (remedy,) = [each.remedy for each in caught.value.violations if each.reason == "NotSplit"]
    possible = name == "exaone4" and accelerator == "nvidia-h100-80gb" and not quantized
    assert (f"use tensor 1, pipeline 1, data {count}" in remedy) == possible
    if "use runtime: vllm" in remedy:
        assert plan(spec("hf://org/m", accelerator, count, runtime="vllm"), Catalogue.load(), config).estimate
    elif needed := re.search(
        r"runtime: vllm, use at least (\d+) × \S+ with tensor (\d+)(?: × pipeline (\d+))?", remedy
    ):
        devices, tensor, pipeline = (int(each or 1) for each in needed.groups())
        assert devices == tensor * pipeline > count
        sizes = {"tensor": tensor, "pipeline": pipeline}
        nodes = -(-devices // 8)
        larger = spec(
            "hf://org/m", accelerator, devices // nodes, parallelism=sizes, runtime="vllm", hardware={"nodes": nodes}
        )
        assert study(larger, Catalogue.load(), config).chosen.problem is None
    else:
        assert remedy.startswith(("use tensor 1", "with runtime: vllm", "use a model whose architecture"))


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
def test_config_that_is_not_understood_is_unknown_and_not_refused(
    spec: Callable[..., Spec], change: dict[str, Any]
) -> None:
    config = {**CONFIG_MAPPING["exaone4"]().to_dict(), "architectures": ["Exaone4ForCausalLM"], **change}
    planned = plan(spec("hf://org/m", "nvidia-h200", 8), Catalogue.load(), config)
    assert planned.estimate is not None or planned.unknown


def test_vision_encoder_takes_memory(spec: Callable[..., Spec]) -> None:
    made = {"architectures": ["Gemma3ForConditionalGeneration"], "vision_config": {}}
    sees = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27}
    tested_spec = spec("hf://org/m", "nvidia-l4", 1)
    blind, seeing = (
        plan(tested_spec, Catalogue.load(), {**made, "vision_config": each}).estimate for each in ({}, sees)
    )
    assert blind and seeing
    assert seeing.weight_bytes_per_gpu - blind.weight_bytes_per_gpu == pytest.approx(2 * 411e6, rel=0.01)


QWEN2_VL = {
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "max_position_embeddings": 32768,
    "dtype": "bfloat16",
}
QWEN2_VISION = {"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "patch_size": 14, "spatial_merge_size": 2}
QWEN2_5_VISION = {
    "depth": 32, "hidden_size": 1280, "hidden_act": "silu", "intermediate_size": 3420, "patch_size": 14,
    "spatial_merge_size": 2, "out_hidden_size": 3584,
}  # fmt: skip
QWEN_2B = {
    "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
    "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
QWEN_7B = {
    "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
}  # fmt: skip


def _qwen3_vl(tied: bool, vision: dict[str, Any], **text: int) -> dict[str, Any]:
    inner = {
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 262144,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
    } | text  # fmt: skip
    encoder = {
        "num_position_embeddings": 2304, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
        "out_hidden_size": text["hidden_size"], "in_channels": 3, **vision,
    }  # fmt: skip
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"], "text_config": inner, "vision_config": encoder,
        "tie_word_embeddings": tied,
    }  # fmt: skip


SMALL = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17]}
LARGE = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "deepstack_visual_indexes": [8, 16, 24]}
CHATGLM = {
    "architectures": ["ChatGLMModel"], "hidden_size": 4096, "num_attention_heads": 32, "kv_channels": 128,
    "auto_map": {"AutoModelForCausalLM": "modeling_chatglm.ChatGLMForConditionalGeneration"},
    "multi_query_group_num": 2, "multi_query_attention": True, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "size"),
    [
        pytest.param({**QWEN2_VL, **QWEN_2B, "vision_config": {**QWEN2_VISION, "hidden_size": 1536}}, 4.4e9, id="2-2B"),
        pytest.param(
            {**QWEN2_VL, **QWEN_7B, "vision_config": {**QWEN2_VISION, "hidden_size": 3584}}, 16.6e9, id="2-7B"
        ),
        pytest.param(
            {
                **QWEN2_VL, **QWEN_7B, "architectures": ["Qwen2_5_VLForConditionalGeneration"],
                "vision_config": QWEN2_5_VISION,
            },
            16.6e9, id="2.5-7B",
        ),
        pytest.param(
            _qwen3_vl(
                True, SMALL, hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16
            ),
            4.26e9, id="3-2B",
        ),
        pytest.param(
            _qwen3_vl(
                True, SMALL, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32
            ),
            8.88e9, id="3-4B",
        ),
        pytest.param(
            _qwen3_vl(
                False, LARGE, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32
            ),
            17.53e9, id="3-8B",
        ),
        pytest.param(
            {**CHATGLM, "num_layers": 40, "ffn_hidden_size": 13696, "padded_vocab_size": 151552, "seq_length": 131072},
            18.8e9, id="glm-4-9b",
        ),
        pytest.param(
            {**CHATGLM, "num_layers": 28, "ffn_hidden_size": 13696, "padded_vocab_size": 65024, "seq_length": 8192},
            12.49e9, id="chatglm3-6b",
        ),
    ],
)  # fmt: skip
def test_sizes_of_published_models_equal_their_files(config: dict[str, Any], size: float) -> None:
    shape = shape_of(ModelSource.parse("hf://org/model"), config, "vllm")
    assert isinstance(shape, Shape), shape
    assert weight_bytes(shape.config, 2) == pytest.approx(size, rel=0.01)
