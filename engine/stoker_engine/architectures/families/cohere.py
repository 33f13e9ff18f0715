"""Cohere's Command-R and R7B: layer norms and a gated MLP.

Attention and MLP are computed in parallel, and logits are scaled. In R7B (`cohere2`) layers with a sliding window have
rotary embeddings, and layers with full attention have none.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from stoker_engine.architectures.config_fields import Fields
from stoker_engine.architectures.decoder_config import DecoderConfig, HeadConfig, LayerConfig, QKNormConfig
from stoker_engine.architectures.families.family import Family, GGUFFamily
from stoker_engine.architectures.families.reading import (
    PARALLEL,
    alike,
    attention,
    layer_kinds,
    layer_norm,
    mlp,
    of_kinds,
    windowed,
)
from stoker_engine.architectures.families.shared_weight_names import GGUF_HEAD_NORMS, IGNORED, LLAMA_NAMES, head_norms
from stoker_engine.architectures.gguf.gguf_metadata import Metadata
from stoker_engine.architectures.rope_config import read_rope
from stoker_engine.architectures.weight_names import WeightNames


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

_WEIGHTS: Final = WeightNames(
    names=LLAMA_NAMES,
    fused=head_norms("model.layers.{i}.self_attn.q_norm", "model.layers.{i}.self_attn.k_norm"),
    ignored=IGNORED,
)


def _gguf_config(metadata: Metadata) -> dict[str, Any]:
    return {"logit_scale": metadata.get("logit_scale")}


COHERE: Final = Family(
    "cohere",
    _cohere,
    _COHERE,
    weight_names=_WEIGHTS,
    gguf=GGUFFamily("command-r", "CohereForCausalLM", _gguf_config, fused=GGUF_HEAD_NORMS),
)

COHERE2: Final = Family(
    "cohere2",
    _cohere2,
    {**_COHERE, "rope_theta": 10_000.0, "sliding_window": 4096, "sliding_window_pattern": 4},
    weight_names=_WEIGHTS,
    gguf=GGUFFamily("cohere2", "Cohere2ForCausalLM", _gguf_config),
)
