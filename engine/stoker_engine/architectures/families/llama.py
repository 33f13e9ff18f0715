"""Llama and its many relatives: pre-norm by root mean square, rotary positions, gated MLP.

Llama 1–3.3 and Yi, Mistral (a window on every layer), Qwen 1 to 3 (query, key and value biases; Qwen 3 normalised
heads), InternLM 2 and 3, Phi-3 to 4, Granite (multipliers).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from stoker_engine.architectures.config_fields import MIN_POSITIVE, Fields
from stoker_engine.architectures.decoder_config import (
    AttentionConfig,
    DecoderConfig,
    EmbeddingConfig,
    HeadConfig,
    LayerConfig,
    MLPConfig,
    QKNormConfig,
    ResidualConfig,
)
from stoker_engine.architectures.families.family_config import FamilyConfig
from stoker_engine.architectures.families.reading import (
    alike,
    attention,
    head_dim,
    layer_kinds,
    mlp,
    of_kinds,
    refuse,
    rms_norm,
    windowed,
)
from stoker_engine.architectures.rope_config import read_rope


def _llama(c: Fields) -> DecoderConfig:
    bias = c.flag("attention_bias")
    return _pre_norm(c, attention(c, qkv_bias=bias, out_bias=bias), mlp(c, bias=c.flag("mlp_bias")))


def _mistral(c: Fields) -> DecoderConfig:
    return _pre_norm(c, windowed(c, attention(c), "sliding_attention"), mlp(c))


def _phi3(c: Fields) -> DecoderConfig:
    rope = read_rope(c, head_dim(c), renamed={"su": "longrope", "yarn": "longrope"})
    sees = windowed(c, replace(attention(c), rope=rope), "sliding_attention")
    return DecoderConfig(rms_norm(c), alike(c, sees, mlp(c)))


def _qwen1(c: Fields) -> DecoderConfig:
    # use_dynamic_ntk and use_logn_attn change nothing up to seq_length, which is why that is the longest sequence.
    refuse(c, no_bias=True, scale_attn_weights=True)
    heads = attention(c, qkv_bias=True)
    return _pre_norm(c, heads, replace(mlp(c), size=c.integer("intermediate_size", least=2) // 2))


def qwen_layers(c: Fields, heads: AttentionConfig, dense: MLPConfig) -> tuple[LayerConfig, ...]:
    """Layers of Qwen 2 and 3: only if `use_sliding_window`, and then only the upper ones, have a window."""
    heads = replace(heads, rope=read_rope(c, heads.head_dim))
    slides = c.flag("use_sliding_window") and c.get("sliding_window") is not None
    kinds = layer_kinds(c, lambda index: slides and index >= c.integer("max_window_layers", least=0))
    return of_kinds(c, kinds, lambda kind: LayerConfig(windowed(c, heads, kind) if slides else heads, dense))


def qwen3_attention(c: Fields) -> AttentionConfig:
    """Heads of Qwen 3: queries and keys normalised a head at a time."""
    bias = c.flag("attention_bias")
    return replace(attention(c, qkv_bias=bias, out_bias=bias), qk_norm=QKNormConfig(rms_norm(c), "head"))


def _qwen2(c: Fields) -> DecoderConfig:
    return DecoderConfig(rms_norm(c), qwen_layers(c, attention(c, qkv_bias=True), mlp(c)))


def _qwen3(c: Fields) -> DecoderConfig:
    return DecoderConfig(rms_norm(c), qwen_layers(c, qwen3_attention(c), mlp(c)))


def _internlm2(c: Fields) -> DecoderConfig:
    bias = c.flag("bias")
    return _pre_norm(c, attention(c, qkv_bias=bias, out_bias=bias), mlp(c))


def _internlm3(c: Fields) -> DecoderConfig:
    bias = c.flag("bias")
    return _pre_norm(c, attention(c, qkv_bias=c.flag("qkv_bias"), out_bias=bias), mlp(c, bias=bias))


def granite_decoder(c: Fields, layers: tuple[LayerConfig, ...]) -> DecoderConfig:
    """Granite: Llama with multipliers on the embedding, the residual stream and the logits."""
    scaling = c.number("logits_scaling", least=MIN_POSITIVE)
    return DecoderConfig(
        rms_norm(c),
        layers,
        residual=ResidualConfig(multiplier=c.number("residual_multiplier")),
        embedding=EmbeddingConfig(multiplier=c.number("embedding_multiplier")),
        head=HeadConfig(multiplier=1 / scaling),
    )


def granite_attention(c: Fields) -> AttentionConfig:
    """Granite's heads, whose scale the config states."""
    bias = c.flag("attention_bias")
    heads = attention(c, qkv_bias=bias, out_bias=bias)
    return replace(heads, scale=c.number("attention_multiplier"), rope=read_rope(c, heads.head_dim))


def _granite(c: Fields) -> DecoderConfig:
    return granite_decoder(c, alike(c, granite_attention(c), mlp(c, bias=c.flag("mlp_bias"))))


def _pre_norm(c: Fields, heads: AttentionConfig, dense: MLPConfig) -> DecoderConfig:
    return DecoderConfig(rms_norm(c), alike(c, replace(heads, rope=read_rope(c, heads.head_dim)), dense))


_COMMON: Final = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_QWEN: Final = {
    **_COMMON,
    "vocab_size": 151_936,
    "intermediate_size": 22_016,
    "max_position_embeddings": 32_768,
    "eos_token_id": None,
}
#: Qwen 2's and 3's; their mixtures of experts start from these, too.
QWEN2_DEFAULTS: Final = {
    **_QWEN,
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
GRANITE_DEFAULTS: Final = {
    **_COMMON,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
}

LLAMA: Final = FamilyConfig("llama", _llama, _COMMON)
MISTRAL: Final = FamilyConfig(
    "mistral",
    _mistral,
    {
        **_COMMON,
        "intermediate_size": 14_336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
    },
)
PHI3: Final = FamilyConfig(
    "phi3",
    _phi3,
    {
        **_COMMON,
        "vocab_size": 32_064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 32_000,
    },
)
QWEN1: Final = FamilyConfig(
    "qwen", _qwen1, {**_QWEN, "max_position_embeddings": 8192}, names={"max_position_embeddings": "seq_length"}
)
QWEN2: Final = FamilyConfig("qwen2", _qwen2, QWEN2_DEFAULTS)
QWEN3: Final = FamilyConfig("qwen3", _qwen3, {**QWEN2_DEFAULTS, "head_dim": 128})
INTERNLM2: Final = FamilyConfig("internlm2", _internlm2, {**_COMMON, "vocab_size": 103_168, "bias": True})
INTERNLM3: Final = FamilyConfig(
    "internlm3", _internlm3, {**_COMMON, "vocab_size": 128_512, "max_position_embeddings": 32_768}
)
GRANITE: Final = FamilyConfig("granite", _granite, GRANITE_DEFAULTS)
