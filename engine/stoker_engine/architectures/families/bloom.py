"""BLOOM: ALiBi instead of position embeddings."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from stoker_engine.architectures.config_fields import Fields
from stoker_engine.architectures.decoder_config import DecoderConfig, EmbeddingConfig
from stoker_engine.architectures.families.falcon import FALCON_FUSED, FALCON_NAMES
from stoker_engine.architectures.families.family import Family, GGUFFamily
from stoker_engine.architectures.families.reading import alibi_slopes, alike, attention, layer_norm, mlp, refuse
from stoker_engine.architectures.weight_names import WeightNames


def _bloom(c: Fields) -> DecoderConfig:
    refuse(c, apply_residual_connection_post_layernorm=False)
    heads = attention(c, qkv_bias=True, out_bias=True)
    heads = replace(heads, alibi_slopes=alibi_slopes(heads.num_heads))
    layers = alike(c, heads, mlp(c, gated=False, bias=True))
    return DecoderConfig(layer_norm(c), layers, embedding=EmbeddingConfig(norm=True))


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

_WEIGHTS: Final = WeightNames(
    names=FALCON_NAMES | {"embed_norm": "transformer.word_embeddings_layernorm"},
    fused=FALCON_FUSED,
    renames=((r"^(word_embeddings|word_embeddings_layernorm|h|ln_f)\.", r"transformer.\1."),),
)

BLOOM: Final = Family("bloom", _bloom, _BLOOM, weight_names=_WEIGHTS, gguf=GGUFFamily("bloom", "BloomForCausalLM"))
