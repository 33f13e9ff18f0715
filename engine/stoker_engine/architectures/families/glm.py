"""GLM-4: half of each head is rotated, in adjacent pairs; GLM-4-0414 adds norms after each block.

In GLM-4.5 the first layers are dense, and the others are mixtures of experts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from stoker_engine.architectures.config_fields import Fields
from stoker_engine.architectures.decoder_config import DecoderConfig, QKNormConfig, ResidualConfig
from stoker_engine.architectures.families.family import Family, GGUFFamily
from stoker_engine.architectures.families.gemma import SANDWICH
from stoker_engine.architectures.families.mixture import sigmoid_moe, sparse
from stoker_engine.architectures.families.reading import alike, attention, mlp, rms_norm, rotated
from stoker_engine.architectures.families.shared_weight_names import (
    GATE_UP,
    GGUF_GATE_UP,
    IGNORED,
    LAYER,
    LLAMA_NAMES,
    MOE_NAMES,
    MOE_STACKS,
    QK_NORMS,
    SHARED_EXPERTS,
)
from stoker_engine.architectures.rope_config import read_rope
from stoker_engine.architectures.weight_layout import Fused, Split
from stoker_engine.architectures.weight_names import WeightNames


def _glm(c: Fields) -> DecoderConfig:
    return _decoder(c, ResidualConfig())


def _glm4(c: Fields) -> DecoderConfig:
    return _decoder(c, SANDWICH)


def _decoder(c: Fields, residual: ResidualConfig) -> DecoderConfig:
    heads = attention(c, qkv_bias=c.flag("attention_bias"))
    heads = replace(heads, rope=read_rope(c, heads.head_dim, interleaved=True))
    return DecoderConfig(rms_norm(c), alike(c, heads, mlp(c)), residual=residual)


def _glm4_moe(c: Fields) -> DecoderConfig:
    heads = rotated(c, attention(c, qkv_bias=c.flag("attention_bias")))
    if c.flag("use_qk_norm"):
        heads = replace(heads, qk_norm=QKNormConfig(rms_norm(c), "head"))
    first = c.integer("first_k_dense_replace", lower=0)
    return DecoderConfig(rms_norm(c), sparse(alike(c, heads, mlp(c)), sigmoid_moe(c), lambda index: index >= first))


_GLM: Final = {
    "vocab_size": 151_552,
    "hidden_size": 4096,
    "intermediate_size": 13_696,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1.5625e-07,
    "attention_bias": True,
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.5,
    "eos_token_id": [151_329, 151_336, 151_338],
    "tie_word_embeddings": False,
}

_WEIGHTS: Final = WeightNames(
    names={
        **LLAMA_NAMES,
        "layers.{i}.post_attention_norm": "model.layers.{i}.post_self_attn_layernorm",
        "layers.{i}.post_mlp_norm": "model.layers.{i}.post_mlp_layernorm",
    },
    fused={"model.layers.{i}.mlp.gate_up_proj": Fused(GATE_UP, Split.ROWS)},
    ignored=IGNORED,
)

_MOE_WEIGHTS: Final = WeightNames(
    names=MOE_NAMES | QK_NORMS | SHARED_EXPERTS, fused=MOE_STACKS, ignored=IGNORED, layer=LAYER
)

GLM: Final = Family("glm", _glm, _GLM, weight_names=_WEIGHTS)

GLM4: Final = Family(
    "glm4", _glm4, _GLM, weight_names=_WEIGHTS, gguf=GGUFFamily("glm4", "Glm4ForCausalLM", fused=GGUF_GATE_UP)
)

GLM4_MOE: Final = Family(
    "glm4_moe",
    _glm4_moe,
    {
        "vocab_size": 151_552,
        "hidden_size": 4096,
        "intermediate_size": 10_944,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.5,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_routed_experts": 128,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "use_qk_norm": False,
        "tie_word_embeddings": False,
    },
    weight_names=_MOE_WEIGHTS,
    gguf=GGUFFamily(
        "glm4moe",
        "Glm4MoeForCausalLM",
        names=lambda metadata: {"layers.{i}.pre_mlp_norm": "blk.{i}.post_attention_norm"},
    ),
)
