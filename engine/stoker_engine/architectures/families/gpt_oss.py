"""gpt-oss: attention sinks, sliding windows in every other layer, and a mixture with biases and a clamped SwiGLU.

Experts are stacked: unquantized as [inputs, outputs], or in MXFP4 blocks as [outputs, inputs].
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from stoker_engine.architectures.activation import ClampedSwiGLU
from stoker_engine.architectures.config_fields import MIN_POSITIVE, Fields
from stoker_engine.architectures.decoder_config import DecoderConfig, LayerConfig
from stoker_engine.architectures.families.family import Family, GGUFFamily
from stoker_engine.architectures.families.reading import attention, layer_kinds, mlp, of_kinds, rms_norm, windowed
from stoker_engine.architectures.families.shared_weight_names import LLAMA_NAMES, expert_stack
from stoker_engine.architectures.gguf.gguf_metadata import Metadata, rope_scaling
from stoker_engine.architectures.moe_config import MoEConfig
from stoker_engine.architectures.rope_config import read_rope
from stoker_engine.architectures.weight_layout import Split
from stoker_engine.architectures.weight_names import WeightNames


def _gpt_oss(c: Fields) -> DecoderConfig:
    bias = c.flag("attention_bias")
    heads = replace(attention(c, qkv_bias=bias, out_bias=bias), sinks=True)
    gate = ClampedSwiGLU(c.number("swiglu_alpha"), c.number("swiglu_limit", lower=MIN_POSITIVE))
    experts = replace(mlp(c), act=gate)  # hidden_act is ignored
    moe = MoEConfig(
        num_experts=c.integer("num_local_experts"),
        num_experts_per_tok=c.integer("num_experts_per_tok"),
        intermediate_size=experts.size,
        bias=True,
        router_bias=True,
    )

    def layer(kind: str) -> LayerConfig:
        return LayerConfig(replace(windowed(c, heads, kind), rope=read_rope(c, heads.head_dim, kind)), experts, moe)

    kinds = layer_kinds(c, lambda index: index % 2 == 0)
    return DecoderConfig(rms_norm(c, wide=True), of_kinds(c, kinds, layer))


_MLP: Final = "model.layers.{i}.mlp"
_INTERLEAVED: Final = Split.INTERLEAVED_EXPERTS
_WEIGHTS: Final = WeightNames(
    names={
        **LLAMA_NAMES,
        "layers.{i}.sinks": "model.layers.{i}.self_attn.sinks",
        "layers.{i}.router": f"{_MLP}.router",
    },
    fused={
        f"{_MLP}.experts.gate_up_proj": expert_stack("gate", "up", split=_INTERLEAVED, transposed=True),
        f"{_MLP}.experts.gate_up_proj_blocks": expert_stack("gate", "up", split=_INTERLEAVED),
        f"{_MLP}.experts.gate_up_proj_bias": expert_stack("gate", "up", split=_INTERLEAVED, of="bias"),
        f"{_MLP}.experts.down_proj": expert_stack("down", transposed=True),
        f"{_MLP}.experts.down_proj_blocks": expert_stack("down"),
        f"{_MLP}.experts.down_proj_bias": expert_stack("down", split=Split.EACH_ROW, of="bias"),
    },
)


def _gguf_config(metadata: Metadata) -> dict[str, Any]:
    stretched = rope_scaling(metadata).get("rope_scaling", {"rope_type": "default"})
    return {"rope_scaling": {**stretched, "truncate": False}}


GPT_OSS: Final = Family(
    "gpt_oss",
    _gpt_oss,
    {
        "vocab_size": 201_088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "attention_bias": True,
        "hidden_act": "silu",
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "sliding_window": 128,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
    },
    weight_names=_WEIGHTS,
    gguf=GGUFFamily(
        "gpt-oss",
        "GptOssForCausalLM",
        _gguf_config,
        names=lambda metadata: {"layers.{i}.pre_mlp_norm": "blk.{i}.post_attention_norm"},
    ),
)
