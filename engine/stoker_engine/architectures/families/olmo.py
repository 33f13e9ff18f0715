"""OLMo: norms without weights, clamped queries, keys and values. OLMo 2: norms after each block instead of before.

OLMoE is a mixture of experts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from stoker_engine.architectures.config_fields import Fields
from stoker_engine.architectures.decoder_config import DecoderConfig, QKNormConfig, ResidualConfig
from stoker_engine.architectures.families.family import Family, GGUFFamily
from stoker_engine.architectures.families.mixture import every_layer, softmax_moe, sparse
from stoker_engine.architectures.families.reading import alike, attention, layer_norm, mlp, rms_norm, rotated
from stoker_engine.architectures.families.shared_weight_names import (
    IGNORED,
    LLAMA_NAMES,
    LLAMA_WEIGHTS,
    QK_NORM_MOE_WEIGHTS,
    QK_NORMS,
)
from stoker_engine.architectures.rope_config import read_rope
from stoker_engine.architectures.weight_names import WeightNames


def _olmo(c: Fields) -> DecoderConfig:
    bias = c.flag("attention_bias")
    heads = attention(c, qkv_bias=bias, out_bias=bias)
    heads = replace(heads, rope=read_rope(c, heads.head_dim), clip_qkv=c.optional("clip_qkv", lower=0))
    return DecoderConfig(layer_norm(c, weight=False), alike(c, heads, mlp(c)))


def _olmo2(c: Fields) -> DecoderConfig:
    bias = c.flag("attention_bias")
    norm = rms_norm(c, wide=True)
    heads = attention(c, qkv_bias=bias, out_bias=bias)
    heads = replace(heads, rope=read_rope(c, heads.head_dim), qk_norm=QKNormConfig(norm, "full"))
    residual = ResidualConfig(norms=("post_attention_norm", "post_mlp_norm"))
    return DecoderConfig(norm, alike(c, heads, mlp(c)), residual=residual)


def _olmoe(c: Fields) -> DecoderConfig:
    bias = c.flag("attention_bias")
    norm = rms_norm(c)
    heads = replace(
        rotated(c, attention(c, qkv_bias=bias, out_bias=bias)),
        qk_norm=QKNormConfig(norm, "full"),
        clip_qkv=c.optional("clip_qkv", lower=0),
    )
    return DecoderConfig(norm, sparse(alike(c, heads, mlp(c)), softmax_moe(c), every_layer))


_OLMO: Final = {
    "vocab_size": 50_304,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "layer_norm_eps": 1e-5,  # not a field of this family: fixed in its norms
    "rope_theta": 10_000.0,
    "eos_token_id": 50_279,
    "tie_word_embeddings": False,
}

#: Norms after each block instead of before.
_OLMO2_WEIGHTS: Final = WeightNames(
    names={
        **{ours: theirs for ours, theirs in LLAMA_NAMES.items() if not ours.endswith(("input_norm", "pre_mlp_norm"))},
        **QK_NORMS,
        "layers.{i}.post_attention_norm": "model.layers.{i}.post_attention_layernorm",
        "layers.{i}.post_mlp_norm": "model.layers.{i}.post_feedforward_layernorm",
    },
    ignored=IGNORED,
)

OLMO: Final = Family(
    "olmo", _olmo, _OLMO, weight_names=LLAMA_WEIGHTS, gguf=GGUFFamily("olmo", "OlmoForCausalLM", rotated=True)
)

OLMO2: Final = Family(
    "olmo2",
    _olmo2,
    {**_OLMO, "rms_norm_eps": 1e-5},
    weight_names=_OLMO2_WEIGHTS,
    gguf=GGUFFamily("olmo2", "Olmo2ForCausalLM"),
)

OLMOE: Final = Family(
    "olmoe",
    _olmoe,
    {
        "vocab_size": 50_304,
        "hidden_size": 2048,
        "intermediate_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "num_experts_per_tok": 8,
        "num_experts": 64,
        "norm_topk_prob": False,
        "eos_token_id": 50_279,
        "tie_word_embeddings": False,
    },
    weight_names=QK_NORM_MOE_WEIGHTS,
    gguf=GGUFFamily("olmoe", "OlmoeForCausalLM"),
)
