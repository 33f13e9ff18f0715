"""Families whose attention fades with distance (ALiBi) instead of knowing positions: BLOOM, MPT, and some Falcons."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from stoker_engine.architectures.config_fields import Fields
from stoker_engine.architectures.decoder_config import DecoderConfig, EmbeddingConfig, MLPConfig, ResidualConfig
from stoker_engine.architectures.families.family_config import FamilyConfig
from stoker_engine.architectures.families.reading import alibi_slopes, alike, attention, layer_norm, mlp, refuse
from stoker_engine.architectures.rope_config import read_rope


def _bloom(c: Fields) -> DecoderConfig:
    refuse(c, apply_residual_connection_post_layernorm=False)
    heads = attention(c, qkv_bias=True, out_bias=True)
    heads = replace(heads, alibi_slopes=alibi_slopes(heads.num_heads))
    layers = alike(c, heads, mlp(c, gated=False, bias=True))
    return DecoderConfig(layer_norm(c), layers, embedding=EmbeddingConfig(norm=True))


def _mpt(c: Fields) -> DecoderConfig:
    refuse(c, no_bias=True, logit_scale=None, norm_type="low_precision_layernorm", expansion_ratio=4)
    stated: dict[str, Any] = {"alibi": True, "alibi_bias_max": 8, **c.object("attn_config")}
    options = Fields(stated, {})
    refuse(
        options, alibi=True, prefix_lm=False, qk_ln=False, attn_uses_sequence_id=False, attn_type="multihead_attention"
    )
    heads = attention(c)
    heads = replace(
        heads,
        scale=options.optional("softmax_scale") or heads.scale,
        clip_qkv=options.optional("clip_qkv", least=0),
        alibi_slopes=alibi_slopes(heads.num_heads, options.number("alibi_bias_max")),
    )
    dense = MLPConfig(4 * c.integer("hidden_size"), "gelu", gated=False)
    return DecoderConfig(layer_norm(c, bias=False), alike(c, heads, dense))


def _falcon(c: Fields) -> DecoderConfig:
    bias = c.flag("bias")
    heads = attention(c, qkv_bias=bias, out_bias=bias)
    if c.flag("new_decoder_architecture"):
        side_by_side, two_norms = True, c.get("num_ln_in_parallel_attn") in (None, 2)
    else:
        heads = replace(heads, num_kv_heads=1 if c.flag("multi_query") else heads.num_heads)
        side_by_side, two_norms = c.flag("parallel_attn"), False
    if c.flag("alibi"):
        # Falcon scales the scores after the slopes have joined them. transformers also rounds slope × position to
        # bfloat16, by which it differs from this wherever the product has more than eight bits.
        heads = replace(heads, alibi_slopes=tuple(slope * heads.scale for slope in alibi_slopes(heads.num_heads)))
    else:
        heads = replace(heads, rope=read_rope(c, heads.head_dim))
    if not side_by_side:
        residual = ResidualConfig()
    else:
        residual = ResidualConfig("parallel", ("input_norm", "pre_mlp_norm") if two_norms else ("input_norm",))
    return DecoderConfig(layer_norm(c), alike(c, heads, mlp(c, gated=False, bias=bias)), residual=residual)


_BLOOM: Final = {
    "vocab_size": 250_880,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "max_position_embeddings": 2048,
    "hidden_act": "gelu_new",
    "layer_norm_eps": 1e-5,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}
_MPT: Final = {
    "vocab_size": 50_368,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "max_position_embeddings": 2048,
    "layer_norm_eps": 1e-5,
    "no_bias": True,
    "tie_word_embeddings": True,
}
_FALCON: Final = {
    "vocab_size": 65_024,
    "hidden_size": 4544,
    "num_hidden_layers": 32,
    "num_attention_heads": 71,
    "max_position_embeddings": 2048,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
    "multi_query": True,
    "parallel_attn": True,
    "rope_theta": 10_000.0,
    "eos_token_id": 11,
    "tie_word_embeddings": True,
}

BLOOM: Final = FamilyConfig("bloom", _bloom, _BLOOM)
MPT: Final = FamilyConfig("mpt", _mpt, _MPT)
FALCON: Final = FamilyConfig("falcon", _falcon, _FALCON)
