"""OLMo: norms without weights, clamped queries, keys and values. OLMo 2: norms after each block instead of before."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from stoker_engine.architectures.config_fields import Fields
from stoker_engine.architectures.decoder_config import DecoderConfig, QKNormConfig, ResidualConfig
from stoker_engine.architectures.families.family_config import FamilyConfig
from stoker_engine.architectures.families.reading import alike, attention, layer_norm, mlp, rms_norm
from stoker_engine.architectures.rope_config import read_rope


def _olmo(c: Fields) -> DecoderConfig:
    bias = c.flag("attention_bias")
    heads = attention(c, qkv_bias=bias, out_bias=bias)
    heads = replace(heads, rope=read_rope(c, heads.head_dim), clip_qkv=c.optional("clip_qkv", least=0))
    return DecoderConfig(layer_norm(c, weight=False), alike(c, heads, mlp(c)))


def _olmo2(c: Fields) -> DecoderConfig:
    bias = c.flag("attention_bias")
    norm = rms_norm(c, wide=True)
    heads = attention(c, qkv_bias=bias, out_bias=bias)
    heads = replace(heads, rope=read_rope(c, heads.head_dim), qk_norm=QKNormConfig(norm, "full"))
    residual = ResidualConfig(norms=("post_attention_norm", "post_mlp_norm"))
    return DecoderConfig(norm, alike(c, heads, mlp(c)), residual=residual)


_OLMO: Final = {
    "vocab_size": 50_304,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "layer_norm_eps": 1e-5,  # no field of the family's; its norms fix it
    "rope_theta": 10_000.0,
    "eos_token_id": 50_279,
    "tie_word_embeddings": False,
}

OLMO: Final = FamilyConfig("olmo", _olmo, _OLMO)
OLMO2: Final = FamilyConfig("olmo2", _olmo2, {**_OLMO, "rms_norm_eps": 1e-5})
