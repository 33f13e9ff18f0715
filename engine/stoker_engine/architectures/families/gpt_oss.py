"""gpt-oss: sinks in attention, windows in every other layer, and a mixture with biases and a clamped gate."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from stoker_engine.architectures.activation import ClampedSwiGLU
from stoker_engine.architectures.config_fields import MIN_POSITIVE, Fields
from stoker_engine.architectures.decoder_config import DecoderConfig, LayerConfig
from stoker_engine.architectures.families.family_config import FamilyConfig
from stoker_engine.architectures.families.reading import attention, layer_kinds, mlp, of_kinds, rms_norm, windowed
from stoker_engine.architectures.moe_config import MoEConfig
from stoker_engine.architectures.rope_config import read_rope


def _gpt_oss(c: Fields) -> DecoderConfig:
    bias = c.flag("attention_bias")
    heads = replace(attention(c, qkv_bias=bias, out_bias=bias), sinks=True)
    gate = ClampedSwiGLU(c.number("swiglu_alpha"), c.number("swiglu_limit", least=MIN_POSITIVE))
    experts = replace(mlp(c), act=gate)  # whatever hidden_act says
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


GPT_OSS: Final = FamilyConfig(
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
)
