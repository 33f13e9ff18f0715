"""Generated configurations: families (mixtures, latent attention, attention sinks, vision models) × spellings of a
quantization × forms of rotary embeddings × nesting × missing fields. Their weights and KV cache are counted
independently, with transformers' classes on meta tensors.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

from stoker_common.model_source import ModelSource
from stoker_engine.sizing.weight_sizes import weight_bytes
from stoker_operator.plan.model_shapes import Shape, shape_of

SEEDS = range(48)
#: Architecture by transformers' type.
FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
}
#: Families with images, whose positions have three dimensions.
WITH_IMAGES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
#: Families with DeepSeek's mixture and latent attention, and those with its mixture.
LATENT, SHARING = ("deepseek_v2", "deepseek_v3"), ("deepseek_v2", "deepseek_v3", "glm4_moe")
COUNTED_EXPERTS = {
    "mixtral": "num_local_experts", "qwen3_moe": "num_experts", "olmoe": "num_experts",
    "granitemoe": "num_local_experts", "gpt_oss": "num_local_experts",
}  # fmt: skip
MODELOPT = {"producer": {"name": "modelopt"}, "ignore": ["lm_head"]}
#: Quantization configs, and bytes per element of a layer's matrices.
QUANTIZATIONS: list[tuple[dict[str, Any] | None, float]] = [
    (None, 2),
    ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 1),
    ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}, 0.5 + 2.5 / 128),
    ({**MODELOPT, "quant_method": "modelopt", "quant_algo": "NVFP4"}, 0.5 + 1 / 16),
    ({**MODELOPT, "quant_method": "modelopt_fp4", "quant_algo": "NVFP4"}, 0.5 + 1 / 16),
    ({**MODELOPT, "quant_algo": "FP8"}, 1),
    ({"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}, 1),
]
ROPES: list[dict[str, Any]] = [
    {},
    {"rope_theta": 500000.0},
    {"rope_scaling": None},
    {"rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
]


class Generated:
    """A random configuration."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.kind = draw.choice(list(FAMILIES))
        heads, size = draw.choice([8, 16]), draw.choice([64, 128])  # rows are long compared with their scale
        self.fields: dict[str, Any] = {
            "hidden_size": heads * size,
            "intermediate_size": 128 * draw.randint(4, 16),
            "num_hidden_layers": draw.randint(1, 4),
            "num_attention_heads": heads,
            "num_key_value_heads": draw.choice([1, 2, heads]),
            "head_dim": size,
            "vocab_size": 128 * draw.randint(4, 64),
            "max_position_embeddings": 8192,
            "tie_word_embeddings": draw.random() < 0.5,
            "pad_token_id": None,
        }
        if self.kind in COUNTED_EXPERTS:
            self.fields["num_experts_per_tok"] = 2
            if self.kind == "qwen3_moe":
                self.fields["moe_intermediate_size"] = 128 * draw.randint(1, 4)
            self.fields[COUNTED_EXPERTS[self.kind]] = draw.choice([4, 8, 16])
        if self.kind in SHARING:
            self.fields |= {
                "n_routed_experts": draw.choice([4, 8, 16]),
                "n_shared_experts": draw.choice([1, 2]),
                "num_experts_per_tok": 2,
                "n_group": 1,
                "topk_group": 1,
                "moe_intermediate_size": 128 * draw.randint(1, 4),
                "first_k_dense_replace": draw.choice([0, 1]),
            }
        if self.kind in LATENT:
            self.fields |= {
                "num_key_value_heads": heads,
                "q_lora_rank": draw.choice([None, 256, 512]),
                "kv_lora_rank": draw.choice([256, 512]),
                "qk_nope_head_dim": 128,
                "qk_rope_head_dim": 64,
                "v_head_dim": draw.choice([64, 128]),
            }
            del self.fields["head_dim"]
        self.vision = {
            "depth": draw.choice([1, 2, 4]), "hidden_size": 512, "num_heads": 8, "intermediate_size": 1024,
            "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
        }  # fmt: skip
        for missing in draw.sample(
            ["head_dim", "intermediate_size", "max_position_embeddings", "tie_word_embeddings"], 2
        ):
            if draw.random() < 0.4 and self.kind not in WITH_IMAGES:
                self.fields.pop(missing, None)
        self.quantization, self.bytes_each = draw.choice(QUANTIZATIONS)
        if self.kind == "gpt_oss":
            self.quantization, self.bytes_each = draw.choice([(None, 2.0), ({"quant_method": "mxfp4"}, 0.5 + 1 / 32)])
        self.rope = draw.choice(self._ropes(size))
        self.nested = draw.random() < 0.3 and self.kind not in WITH_IMAGES
        self.inside = draw.random() < 0.5
        self.dtype = draw.choice([{"torch_dtype": "bfloat16"}, {"dtype": "bfloat16"}, {}])

    def _ropes(self, size: int) -> list[dict[str, Any]]:
        """Return the forms of rotary embeddings that the family has."""
        if self.kind in WITH_IMAGES:
            third = size // 6
            sections = [size // 2 - 2 * third, third, third]
            return [
                {"rope_scaling": {"type": "mrope", "mrope_section": sections}},
                {"rope_scaling": {"rope_type": "default", "mrope_section": sections}},
                {"rope_scaling": {"type": "mrope", "rope_type": "mrope", "mrope_section": sections}},
            ]
        if self.kind == "phi3":  # its files call longrope yarn
            factors = {"short_factor": [1.0] * (size // 2), "long_factor": [4.0] * (size // 2)}
            stretched = {"max_position_embeddings": 8192, "original_max_position_embeddings": 2048}
            return [
                *(rope for rope in ROPES if "yarn" not in str(rope)),
                {"rope_scaling": {"type": "longrope", **factors}, **stretched},
                {"rope_scaling": {"type": "su", **factors}, **stretched},
                {"rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, **factors}, **stretched},
            ]
        if self.kind == "gemma3_text":  # it has two, of layers with and without a window
            return [{}, {"rope_theta": 500000.0}, {"rope_scaling": None}]
        return ROPES

    @property
    def config(self) -> dict[str, Any]:
        """Return the content of config.json."""
        text = {**self.fields, **self.rope, "model_type": self.kind}
        stated = {"quantization_config": self.quantization} if self.quantization else {}
        if self.kind in WITH_IMAGES:
            # Older files store the text model's fields beside the encoder's, newer ones in text_config.
            text = {"text_config": text} if self.inside or self.kind == "qwen3_vl" else text
            tied = {"tie_word_embeddings": self.fields["tie_word_embeddings"]}
            return {
                **text, **stated, **tied, **self.dtype, "vision_config": self._encoder(),
                "architectures": [FAMILIES[self.kind]],
            }  # fmt: skip
        if not self.nested:
            return {**text, **stated, **self.dtype, "architectures": [FAMILIES[self.kind]]}
        inner, outer = ({**text, **stated}, {}) if self.inside else (text, stated)
        tied = {name: text[name] for name in ("tie_word_embeddings",) if name in text}
        return {"architectures": ["LlavaForConditionalGeneration"], "text_config": inner, **outer, **tied, **self.dtype}

    def _encoder(self) -> dict[str, Any]:
        """Return the vision encoder's config, as each family spells it."""
        width = self.fields["hidden_size"]
        if self.kind == "qwen2_vl":  # embed_dim is hidden_size in other families
            return {
                **{name: value for name, value in self.vision.items() if name != "intermediate_size"},
                "embed_dim": 512, "hidden_size": width, "mlp_ratio": 4,
            }  # fmt: skip
        deep = {"deepstack_visual_indexes": [0], "num_position_embeddings": 256} if self.kind == "qwen3_vl" else {}
        return {**self.vision, **deep, "out_hidden_size": width}

    def counted(self, runtime: str) -> tuple[float, int]:
        """Return the bytes of the weights, and the KV elements per token, by transformers."""
        make = CONFIG_MAPPING[self.kind]
        if self.kind in WITH_IMAGES:
            outer = {"tie_word_embeddings": self.fields["tie_word_embeddings"], "pad_token_id": None}
            whole: Any = make(text_config=self.fields, vision_config=self._encoder(), **outer)
            config, model = whole.get_text_config(), AutoModelForImageTextToText
        else:
            config = whole = make(**self.fields)
            model = AutoModelForCausalLM
        with torch.device("meta"):
            transformers_model = model.from_config(whole)
        total = 0.0
        for name, each in transformers_model.named_parameters():
            matrix = ".layers." in name and each.dim() >= 2 and not name.endswith(("gate.weight", "router.weight"))
            if self.kind == "gpt_oss":
                matrix = name.endswith(("experts.gate_up_proj", "experts.down_proj"))
            # Stoker computes latent attention with this weight unquantized, whatever the file's format.
            matrix = matrix and not (runtime == "stoker" and "kv_b_proj" in name)
            total += each.numel() * (self.bytes_each if matrix else 2)
        if self.kind in LATENT:
            return total, config.num_hidden_layers * (config.kv_lora_rank + config.qk_rope_head_dim)
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return total, 2 * config.num_hidden_layers * config.num_key_value_heads * size


@pytest.mark.parametrize("seed", SEEDS)
def test_sizes_equal_those_of_transformers(seed: int) -> None:
    generated = Generated(seed)
    outside = generated.nested or generated.kind in WITH_IMAGES
    for runtime in ("vllm",) if outside else ("vllm", "stoker"):
        weights, cached = generated.counted(runtime)
        shape = shape_of(ModelSource.parse("hf://org/model"), generated.config, runtime)
        assert isinstance(shape, Shape), (shape, generated.config)
        assert sum(layer.attention.cache.numbers_per_token for layer in shape.config.layers) == cached
        # Stoker uses separate scales for each row of a block, or of a matrix.
        tolerance = 0.01 if runtime == "vllm" else 0.035
        assert weight_bytes(shape.config, 2, formats=shape.formats) == pytest.approx(weights, rel=tolerance), runtime
