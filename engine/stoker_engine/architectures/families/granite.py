"""Granite: Llama with multipliers of embedding, scores, attention and MLP outputs, and logits; and Granite-MoE."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from stoker_engine.architectures.config_fields import MIN_POSITIVE, Fields
from stoker_engine.architectures.decoder_config import (
    AttentionConfig,
    DecoderConfig,
    EmbeddingConfig,
    HeadConfig,
    LayerConfig,
    ResidualConfig,
)
from stoker_engine.architectures.families.family import Family, GGUFFamily
from stoker_engine.architectures.families.llama import LLAMA_DEFAULTS
from stoker_engine.architectures.families.mixture import every_layer, softmax_moe, sparse
from stoker_engine.architectures.families.reading import alike, attention, mlp, rms_norm
from stoker_engine.architectures.families.shared_weight_names import IGNORED, LLAMA_NAMES, LLAMA_WEIGHTS, expert_stacks
from stoker_engine.architectures.gguf.gguf_metadata import Metadata
from stoker_engine.architectures.rope_config import read_rope
from stoker_engine.architectures.weight_names import WeightNames


def _granite(c: Fields) -> DecoderConfig:
    return _decoder(c, alike(c, _attention(c), mlp(c, bias=c.flag("mlp_bias"))))


def _granite_moe(c: Fields) -> DecoderConfig:
    layers = alike(c, _attention(c), mlp(c))
    return _decoder(c, sparse(layers, softmax_moe(c, "num_local_experts"), every_layer))


def _decoder(c: Fields, layers: tuple[LayerConfig, ...]) -> DecoderConfig:
    scaling = c.number("logits_scaling", lower=MIN_POSITIVE)
    return DecoderConfig(
        rms_norm(c),
        layers,
        residual=ResidualConfig(multiplier=c.number("residual_multiplier")),
        embedding=EmbeddingConfig(multiplier=c.number("embedding_multiplier")),
        head=HeadConfig(multiplier=1 / scaling),
    )


def _attention(c: Fields) -> AttentionConfig:
    bias = c.flag("attention_bias")
    heads = attention(c, qkv_bias=bias, out_bias=bias)
    return replace(heads, scale=c.number("attention_multiplier"), rope=read_rope(c, heads.head_dim))


_DEFAULTS: Final = {
    **LLAMA_DEFAULTS,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
}

_MOE: Final = "model.layers.{i}.block_sparse_moe"
_MOE_WEIGHTS: Final = WeightNames(
    names={**LLAMA_NAMES, "layers.{i}.router": f"{_MOE}.router"},
    fused=expert_stacks(_MOE),
    renames=(
        (r"\.input_linear\.weight$", ".experts.gate_up_proj"),
        (r"\.output_linear\.weight$", ".experts.down_proj"),
        (r"\.router\.layer\.", ".router."),
    ),
    ignored=IGNORED,
)


def _gguf_config(metadata: Metadata) -> dict[str, Any]:
    stated = {
        "embedding_multiplier": metadata.get("embedding_scale"),
        "residual_multiplier": metadata.get("residual_scale"),
        "attention_multiplier": metadata.get("attention.scale"),
        "logits_scaling": metadata.get("logit_scale"),
    }
    return {key: value for key, value in stated.items() if value is not None}


GRANITE: Final = Family(
    "granite",
    _granite,
    _DEFAULTS,
    weight_names=LLAMA_WEIGHTS,
    gguf=GGUFFamily("granite", "GraniteForCausalLM", _gguf_config, rotated=True),
)

GRANITE_MOE: Final = Family(
    "granitemoe",
    _granite_moe,
    {**_DEFAULTS, "num_local_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True},
    weight_names=_MOE_WEIGHTS,
    gguf=GGUFFamily("granitemoe", "GraniteMoeForCausalLM", _gguf_config, rotated=True),
)
