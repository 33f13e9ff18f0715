"""Llama 1 to 3.3 and Yi: RMS pre-norms, rotary embeddings, a gated MLP. Many other families are based on it."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from stoker_engine.architectures.config_fields import Fields
from stoker_engine.architectures.decoder_config import AttentionConfig, DecoderConfig, MLPConfig
from stoker_engine.architectures.families.family import Family, GGUFFamily
from stoker_engine.architectures.families.reading import alike, attention, mlp, rms_norm
from stoker_engine.architectures.families.shared_weight_names import LLAMA_WEIGHTS
from stoker_engine.architectures.rope_config import read_rope


def _llama(c: Fields) -> DecoderConfig:
    bias = c.flag("attention_bias")
    return pre_norm(c, attention(c, qkv_bias=bias, out_bias=bias), mlp(c, bias=c.flag("mlp_bias")))


def pre_norm(c: Fields, heads: AttentionConfig, dense: MLPConfig) -> DecoderConfig:
    """Return a decoder like Llama's with attention `heads`, to which the config's rotary embedding is added, and MLP
    `dense`."""
    return DecoderConfig(rms_norm(c), alike(c, replace(heads, rope=read_rope(c, heads.head_dim)), dense))


LLAMA_DEFAULTS: Final = {
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

LLAMA: Final = Family(
    "llama",
    _llama,
    LLAMA_DEFAULTS,
    weight_names=LLAMA_WEIGHTS,
    gguf=GGUFFamily(
        "llama", "LlamaForCausalLM", rotated=True, describes=lambda metadata: not metadata.get("expert_count")
    ),
)
