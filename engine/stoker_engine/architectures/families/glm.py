"""GLM-4: half of each head is rotated, in neighbouring pairs; GLM-4-0414 adds norms after each block."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from stoker_engine.architectures.config_fields import Fields
from stoker_engine.architectures.decoder_config import DecoderConfig, ResidualConfig
from stoker_engine.architectures.families.family_config import FamilyConfig
from stoker_engine.architectures.families.gemma import SANDWICH
from stoker_engine.architectures.families.reading import alike, attention, mlp, rms_norm
from stoker_engine.architectures.rope_config import read_rope


def _glm(c: Fields) -> DecoderConfig:
    return _decoder(c, ResidualConfig())


def _glm4(c: Fields) -> DecoderConfig:
    return _decoder(c, SANDWICH)


def _decoder(c: Fields, residual: ResidualConfig) -> DecoderConfig:
    heads = attention(c, qkv_bias=c.flag("attention_bias"))
    heads = replace(heads, rope=read_rope(c, heads.head_dim, interleaved=True))
    return DecoderConfig(rms_norm(c), alike(c, heads, mlp(c)), residual=residual)


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

GLM: Final = FamilyConfig("glm", _glm, _GLM)
GLM4: Final = FamilyConfig("glm4", _glm4, _GLM)
