"""Generated configurations: families × spellings of a quantization × forms of rotary positions × nesting × missing
fields. Their weights and keys and values are counted independently, in transformers' own classes on meta tensors."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from stoker_engine.contract.sources import ModelSource
from stoker_engine.sizing.weight_sizes import weight_bytes
from stoker_operator.plan.model_shapes import Shape, shape_of

SEEDS = range(32)
#: Transformers' type → the architecture.
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
}
MODELOPT = {"producer": {"name": "modelopt"}, "ignore": ["lm_head"]}
#: What a config says, and bytes of each number of a layer's matrices.
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
    """A configuration that a seed draws."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.kind = draw.choice(list(FAMILIES))
        heads, size = draw.choice([8, 16]), draw.choice([64, 128])  # a row is long beside its scale
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
        if self.kind in ("mixtral", "qwen3_moe", "olmoe"):
            self.fields["num_experts_per_tok"] = 2
            if self.kind == "qwen3_moe":
                self.fields["moe_intermediate_size"] = 128 * draw.randint(1, 4)
            self.fields["num_local_experts" if self.kind == "mixtral" else "num_experts"] = draw.choice([4, 8, 16])
        for missing in draw.sample(
            ["head_dim", "intermediate_size", "max_position_embeddings", "tie_word_embeddings"], 2
        ):
            if draw.random() < 0.4:
                del self.fields[missing]
        self.quantization, self.bytes_each = draw.choice(QUANTIZATIONS)
        # In files of Phi-3 yarn means longrope.
        self.rope = draw.choice([rope for rope in ROPES if self.kind != "phi3" or "yarn" not in str(rope)])
        self.nested = draw.random() < 0.3
        self.inside = draw.random() < 0.5
        self.dtype = draw.choice([{"torch_dtype": "bfloat16"}, {"dtype": "bfloat16"}, {}])

    @property
    def config(self) -> dict[str, Any]:
        """As a config.json states it."""
        text = {**self.fields, **self.rope, "model_type": self.kind}
        stated = {"quantization_config": self.quantization} if self.quantization else {}
        if not self.nested:
            return {**text, **stated, **self.dtype, "architectures": [FAMILIES[self.kind]]}
        inner, outer = ({**text, **stated}, {}) if self.inside else (text, stated)
        tied = {name: text[name] for name in ("tie_word_embeddings",) if name in text}
        return {"architectures": ["LlavaForConditionalGeneration"], "text_config": inner, **outer, **tied, **self.dtype}

    def counted(self) -> tuple[float, int]:
        """Bytes of the weights, and numbers of the KV cache a token, by transformers."""
        config = CONFIG_MAPPING[self.kind](**self.fields)
        with torch.device("meta"):
            theirs = AutoModelForCausalLM.from_config(config)
        total = 0.0
        for name, each in theirs.named_parameters():
            matrix = ".layers." in name and each.dim() >= 2 and not name.endswith(("gate.weight", "router.weight"))
            total += each.numel() * (self.bytes_each if matrix else 2)
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return total, 2 * config.num_hidden_layers * config.num_key_value_heads * size


@pytest.mark.parametrize("seed", SEEDS)
def test_sizes_are_those_of_transformers(seed: int) -> None:
    generated = Generated(seed)
    weights, cached = generated.counted()
    for runtime in ("vllm",) if generated.nested else ("vllm", "stoker"):
        shape = shape_of(ModelSource.parse("hf://org/model"), generated.config, runtime)
        assert isinstance(shape, Shape), (shape, generated.config)
        assert sum(layer.attention.cache.numbers_per_token for layer in shape.config.layers) == cached
        # Our engine gives each row of a block, or of a matrix, scales of its own.
        most = 0.01 if runtime == "vllm" else 0.035
        assert weight_bytes(shape.config, 2, formats=shape.formats) == pytest.approx(weights, rel=most), runtime
