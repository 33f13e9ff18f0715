"""Cohere's Command-R and R7B, and StableLM: norms by mean and variance around a gated MLP.

Command-R computes attention and MLP side by side and scales its logits. In R7B (`cohere2`) the layers with a window
have rotary positions, and those that see everything have none.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from stoker_engine.architectures.config_fields import Fields
from stoker_engine.architectures.decoder_config import (
    DecoderConfig,
    HeadConfig,
    LayerConfig,
    QKNormConfig,
    ResidualConfig,
)
from stoker_engine.architectures.families.family_config import FamilyConfig
from stoker_engine.architectures.families.gpt import PARALLEL
from stoker_engine.architectures.families.reading import (
    alike,
    attention,
    layer_kinds,
    layer_norm,
    mlp,
    of_kinds,
    windowed,
)
from stoker_engine.architectures.rope_config import read_rope


def _cohere(c: Fields) -> DecoderConfig:
    bias = c.flag("attention_bias")
    heads = attention(c, qkv_bias=bias, out_bias=bias)
    norm = QKNormConfig(layer_norm(c, bias=False), "each") if c.flag("use_qk_norm") else None
    heads = replace(heads, qk_norm=norm, rope=read_rope(c, heads.head_dim, interleaved=True))
    return _command(c, alike(c, heads, mlp(c)))


def _cohere2(c: Fields) -> DecoderConfig:
    bias = c.flag("attention_bias")
    heads = attention(c, qkv_bias=bias, out_bias=bias)
    local = windowed(
        c, replace(heads, rope=read_rope(c, heads.head_dim, "sliding_attention", interleaved=True)), "sliding_attention"
    )
    pattern = c.integer("sliding_window_pattern")
    kinds = layer_kinds(c, lambda index: bool((index + 1) % pattern))

    def layer(kind: str) -> LayerConfig:
        return LayerConfig(local if kind == "sliding_attention" and local.sliding_window is not None else heads, mlp(c))

    return _command(c, of_kinds(c, kinds, layer))


def _command(c: Fields, layers: tuple[LayerConfig, ...]) -> DecoderConfig:
    head = HeadConfig(multiplier=c.number("logit_scale"))
    return DecoderConfig(layer_norm(c, bias=False), layers, residual=PARALLEL, head=head)


def _stablelm(c: Fields) -> DecoderConfig:
    heads = attention(c, qkv_bias=c.flag("use_qkv_bias"))
    norm = QKNormConfig(layer_norm(c, bias=False), "each") if c.flag("qk_layernorm") else None
    heads = replace(heads, qk_norm=norm, rope=read_rope(c, heads.head_dim))
    residual = PARALLEL if c.flag("use_parallel_residual") else ResidualConfig()
    return DecoderConfig(layer_norm(c), alike(c, heads, mlp(c)), residual=residual)


_COHERE: Final = {
    "vocab_size": 256_000,
    "hidden_size": 8192,
    "intermediate_size": 22_528,
    "logit_scale": 0.0625,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "max_position_embeddings": 8192,
    "hidden_act": "silu",
    "layer_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "eos_token_id": 255_001,
    "tie_word_embeddings": True,
}
_STABLELM: Final = {
    "vocab_size": 50_304,
    "hidden_size": 2560,
    "intermediate_size": 6912,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
    "hidden_act": "silu",
    "layer_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.25,
    "eos_token_id": 0,
    "tie_word_embeddings": False,
}

COHERE: Final = FamilyConfig("cohere", _cohere, _COHERE)
COHERE2: Final = FamilyConfig(
    "cohere2", _cohere2, {**_COHERE, "rope_theta": 10_000.0, "sliding_window": 4096, "sliding_window_pattern": 4}
)
STABLELM: Final = FamilyConfig("stablelm", _stablelm, _STABLELM)
