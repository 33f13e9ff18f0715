"""Gemma 1 to 3: float32 norms, an embedding scaled by √hidden size; since Gemma 2 norms before and after each block.

Safetensors files store norm weights minus 1. Multimodal checkpoints wrap the decoder, with different prefixes in
transformers 4 and 5.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from stoker_common.errors import ModelError
from stoker_engine.architectures.config_fields import MIN_POSITIVE, Fields
from stoker_engine.architectures.decoder_config import (
    DecoderConfig,
    EmbeddingConfig,
    HeadConfig,
    LayerConfig,
    MLPConfig,
    QKNormConfig,
    ResidualConfig,
)
from stoker_engine.architectures.families.family import Family, GGUFFamily
from stoker_engine.architectures.families.reading import (
    alike,
    attention,
    layer_kinds,
    mlp,
    of_kinds,
    rms_norm,
    windowed,
)
from stoker_engine.architectures.families.shared_weight_names import LLAMA_NAMES, QK_NORMS
from stoker_engine.architectures.gguf.gguf_metadata import Metadata
from stoker_engine.architectures.rope_config import read_rope
from stoker_engine.architectures.weight_layout import AddOne
from stoker_engine.architectures.weight_names import WeightNames

#: Norms before and after attention and MLP.
SANDWICH: Final = ResidualConfig(norms=("input_norm", "post_attention_norm", "pre_mlp_norm", "post_mlp_norm"))


def _gemma1(c: Fields) -> DecoderConfig:
    _refuse_encoder(c)
    bias = c.flag("attention_bias")
    heads = attention(c, qkv_bias=bias, out_bias=bias)
    heads = replace(heads, rope=read_rope(c, heads.head_dim))
    return DecoderConfig(rms_norm(c, wide=True), alike(c, heads, _mlp(c)), embedding=_embedding(c))


def _mlp(c: Fields) -> MLPConfig:
    # Early files state "gelu", but the model was trained with the tanh approximation.
    dense = mlp(c)
    return replace(dense, act="gelu_pytorch_tanh") if dense.act == "gelu" else dense


def _gemma2(c: Fields) -> DecoderConfig:
    return _alternating(c, normalised=False, slides=lambda index: index % 2 == 0)


def _gemma3(c: Fields) -> DecoderConfig:
    pattern = c.optional_integer("sliding_window_pattern")  # every pattern-th layer has full attention
    return _alternating(c, normalised=True, slides=lambda index: bool(pattern and (index + 1) % pattern))


def _alternating(c: Fields, *, normalised: bool, slides: Callable[[int], bool]) -> DecoderConfig:
    _refuse_encoder(c)
    bias = c.flag("attention_bias")
    heads = replace(
        attention(c, qkv_bias=bias, out_bias=bias),
        scale=c.number("query_pre_attn_scalar", lower=MIN_POSITIVE) ** -0.5,
        logits_soft_cap=c.optional("attn_logit_softcapping", lower=MIN_POSITIVE),
        qk_norm=QKNormConfig(rms_norm(c, wide=True), "head") if normalised else None,
    )

    def layer(kind: str) -> LayerConfig:
        return LayerConfig(replace(windowed(c, heads, kind), rope=read_rope(c, heads.head_dim, kind)), mlp(c))

    return DecoderConfig(
        rms_norm(c, wide=True),
        of_kinds(c, layer_kinds(c, slides), layer),
        residual=SANDWICH,
        embedding=_embedding(c),
        head=HeadConfig(soft_cap=c.optional("final_logit_softcapping", lower=MIN_POSITIVE)),
    )


def _embedding(c: Fields) -> EmbeddingConfig:
    return EmbeddingConfig(multiplier=c.integer("hidden_size") ** 0.5)


def _refuse_encoder(c: Fields) -> None:
    if c.flag("use_bidirectional_attention"):
        raise ModelError("use_bidirectional_attention: this is an encoder, not an autoregressive decoder")


_GEMMA1: Final = {
    "vocab_size": 256_000,
    "hidden_size": 3072,
    "intermediate_size": 24_576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
}

_GEMMA2: Final = {
    **_GEMMA1,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}

_GEMMA3: Final = {
    **_GEMMA2,
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "sliding_window_pattern": 6,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
}

_SANDWICH_NAMES: Final = {
    "layers.{i}.post_attention_norm": "model.layers.{i}.post_attention_layernorm",
    "layers.{i}.pre_mlp_norm": "model.layers.{i}.pre_feedforward_layernorm",
    "layers.{i}.post_mlp_norm": "model.layers.{i}.post_feedforward_layernorm",
}
_OPERATIONS: Final = {r"norm\.weight$": AddOne()}
_IGNORED: Final = (r"\.rotary_emb",)

_GEMMA1_WEIGHTS: Final = WeightNames(names=LLAMA_NAMES, operations=_OPERATIONS, ignored=_IGNORED)

_GEMMA2_WEIGHTS: Final = WeightNames(names=LLAMA_NAMES | _SANDWICH_NAMES, operations=_OPERATIONS, ignored=_IGNORED)

_GEMMA3_WEIGHTS: Final = WeightNames(
    names=LLAMA_NAMES | QK_NORMS | _SANDWICH_NAMES,
    renames=((r"^(language_model\.model|model\.language_model)\.", "model."), (r"^language_model\.lm_head", "lm_head")),
    operations=_OPERATIONS,
    ignored=(*_IGNORED, r"(^|\.)vision_tower\.", r"(^|\.)multi_modal_projector\."),
)


def _gguf_scale(layers_of_27b: int) -> Callable[[Metadata], dict[str, Any]]:
    """Return a `GGUFFamily.config` with ``query_pre_attn_scalar``: the head size, but hidden size / heads in the 27B
    model."""

    def config(metadata: Metadata) -> dict[str, Any]:
        size = metadata.get("attention.key_length")
        if metadata.get("block_count") == layers_of_27b:
            size = metadata.get("embedding_length") // metadata.get("attention.head_count")
        return {"query_pre_attn_scalar": size}

    return config


GEMMA1: Final = Family(
    "gemma", _gemma1, _GEMMA1, weight_names=_GEMMA1_WEIGHTS, gguf=GGUFFamily("gemma", "GemmaForCausalLM")
)

GEMMA2: Final = Family(
    "gemma2",
    _gemma2,
    _GEMMA2,
    weight_names=_GEMMA2_WEIGHTS,
    gguf=GGUFFamily("gemma2", "Gemma2ForCausalLM", _gguf_scale(46)),
)

GEMMA3: Final = Family(
    "gemma3_text",
    _gemma3,
    _GEMMA3,
    weight_names=_GEMMA3_WEIGHTS,
    gguf=GGUFFamily("gemma3", "Gemma3ForCausalLM", _gguf_scale(62)),
)
