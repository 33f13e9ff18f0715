"""StableLM: layer norms, optionally also of each query and key head, and a gated MLP."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from stoker_engine.architectures.config_fields import Fields
from stoker_engine.architectures.decoder_config import DecoderConfig, QKNormConfig, ResidualConfig
from stoker_engine.architectures.families.family import Family, GGUFFamily
from stoker_engine.architectures.families.reading import PARALLEL, alike, attention, layer_norm, mlp
from stoker_engine.architectures.families.shared_weight_names import GGUF_HEAD_NORMS, IGNORED, LLAMA_NAMES
from stoker_engine.architectures.rope_config import read_rope
from stoker_engine.architectures.weight_names import WeightNames


def _stablelm(c: Fields) -> DecoderConfig:
    heads = attention(c, qkv_bias=c.flag("use_qkv_bias"))
    norm = QKNormConfig(layer_norm(c, bias=False), "each") if c.flag("qk_layernorm") else None
    heads = replace(heads, qk_norm=norm, rope=read_rope(c, heads.head_dim))
    residual = PARALLEL if c.flag("use_parallel_residual") else ResidualConfig()
    return DecoderConfig(layer_norm(c), alike(c, heads, mlp(c)), residual=residual)


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

_WEIGHTS: Final = WeightNames(
    names={
        **LLAMA_NAMES,
        "layers.{i}.q_norm.{j}": "model.layers.{i}.self_attn.q_layernorm.norms.{j}",
        "layers.{i}.k_norm.{j}": "model.layers.{i}.self_attn.k_layernorm.norms.{j}",
    },
    ignored=IGNORED,
)

STABLELM: Final = Family(
    "stablelm",
    _stablelm,
    _STABLELM,
    weight_names=_WEIGHTS,
    gguf=GGUFFamily("stablelm", "StableLmForCausalLM", fused=GGUF_HEAD_NORMS),
)
