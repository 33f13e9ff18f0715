"""Qwen 1 to 3 and their mixtures of experts: Llama with biases of queries, keys and values, or with head norms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from stoker_engine.architectures.config_fields import Fields
from stoker_engine.architectures.decoder_config import (
    AttentionConfig,
    DecoderConfig,
    LayerConfig,
    MLPConfig,
    QKNormConfig,
)
from stoker_engine.architectures.families.family import Family, GGUFFamily
from stoker_engine.architectures.families.llama import LLAMA_DEFAULTS, pre_norm
from stoker_engine.architectures.families.mixture import softmax_moe, sparse
from stoker_engine.architectures.families.reading import (
    alike,
    attention,
    layer_kinds,
    mlp,
    of_kinds,
    refuse,
    rms_norm,
    rotated,
    windowed,
)
from stoker_engine.architectures.families.shared_weight_names import (
    IGNORED,
    LLAMA_NAMES,
    LLAMA_WEIGHTS,
    MOE_NAMES,
    MOE_STACKS,
    QK_NORM_MOE_WEIGHTS,
    QK_NORMS,
    QKV,
    ROTARY_BUFFER,
)
from stoker_engine.architectures.rope_config import read_rope
from stoker_engine.architectures.weight_layout import Fused, Split
from stoker_engine.architectures.weight_names import WeightNames


def _qwen1(c: Fields) -> DecoderConfig:
    # use_dynamic_ntk and use_logn_attn can be ignored: they have no effect up to seq_length, the maximum sequence
    # length.
    refuse(c, no_bias=True, scale_attn_weights=True)
    heads = attention(c, qkv_bias=True)
    return pre_norm(c, heads, replace(mlp(c), size=c.integer("intermediate_size", lower=2) // 2))


def _layers(c: Fields, heads: AttentionConfig, dense: MLPConfig) -> tuple[LayerConfig, ...]:
    """Return the layers of Qwen 2 and 3. With ``use_sliding_window``, the layers that ``layer_types`` states, or else
    those from ``max_window_layers`` on, have a sliding window."""
    heads = replace(heads, rope=read_rope(c, heads.head_dim))
    slides = c.flag("use_sliding_window") and c.get("sliding_window") is not None
    kinds = layer_kinds(c, lambda index: slides and index >= c.integer("max_window_layers", lower=0))
    return of_kinds(c, kinds, lambda kind: LayerConfig(windowed(c, heads, kind) if slides else heads, dense))


def _qwen3_attention(c: Fields) -> AttentionConfig:
    """Return the attention config of Qwen 3, with norms of each query and key head."""
    bias = c.flag("attention_bias")
    return replace(attention(c, qkv_bias=bias, out_bias=bias), qk_norm=QKNormConfig(rms_norm(c), "head"))


def _qwen2(c: Fields) -> DecoderConfig:
    return DecoderConfig(rms_norm(c), _layers(c, attention(c, qkv_bias=True), mlp(c)))


def _qwen3(c: Fields) -> DecoderConfig:
    return DecoderConfig(rms_norm(c), _layers(c, _qwen3_attention(c), mlp(c)))


def _qwen2_moe(c: Fields) -> DecoderConfig:
    heads = rotated(c, attention(c, qkv_bias=c.flag("qkv_bias")))
    slides = c.flag("use_sliding_window")
    kinds = layer_kinds(c, lambda index: slides and index % 2 == 0 and index < c.integer("max_window_layers", lower=0))
    layers = tuple(LayerConfig(windowed(c, heads, kind) if slides else heads, mlp(c)) for kind in kinds)
    moe = softmax_moe(c, size="moe_intermediate_size")
    moe = replace(moe, shared_intermediate_size=c.integer("shared_expert_intermediate_size"), shared_gate=True)
    return DecoderConfig(rms_norm(c), sparse(layers, moe, _is_sparse(c)))


def _qwen3_moe(c: Fields) -> DecoderConfig:
    heads = rotated(c, _qwen3_attention(c))
    if c.flag("use_sliding_window"):
        heads = windowed(c, heads, "sliding_attention")
    moe = softmax_moe(c, size="moe_intermediate_size")
    return DecoderConfig(rms_norm(c), sparse(alike(c, heads, mlp(c)), moe, _is_sparse(c)))


def _is_sparse(c: Fields) -> Callable[[int], bool]:
    """Return the `is_sparse` of `sparse`: every ``decoder_sparse_step``-th layer, except those in
    ``mlp_only_layers``."""
    step, dense = c.integer("decoder_sparse_step"), set(c.items("mlp_only_layers", int))
    return lambda index: index not in dense and (index + 1) % step == 0


_QWEN: Final = {
    **LLAMA_DEFAULTS,
    "vocab_size": 151_936,
    "intermediate_size": 22_016,
    "max_position_embeddings": 32_768,
    "eos_token_id": None,
}

#: Defaults of Qwen 2 and 3, extended for their mixtures of experts.
_QWEN2: Final = {
    **_QWEN,
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

_QWEN_MOE: Final = {
    **_QWEN2,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "decoder_sparse_step": 1,
    "norm_topk_prob": False,
}

_QWEN1_WEIGHTS: Final = WeightNames(
    names={
        "embed": "transformer.wte",
        "layers.{i}.input_norm": "transformer.h.{i}.ln_1",
        "layers.{i}.o": "transformer.h.{i}.attn.c_proj",
        "layers.{i}.pre_mlp_norm": "transformer.h.{i}.ln_2",
        "layers.{i}.gate": "transformer.h.{i}.mlp.w2",
        "layers.{i}.up": "transformer.h.{i}.mlp.w1",
        "layers.{i}.down": "transformer.h.{i}.mlp.c_proj",
        "final_norm": "transformer.ln_f",
        "lm_head": "lm_head",
    },
    fused={"transformer.h.{i}.attn.c_attn": Fused(QKV, Split.ROWS)},
    ignored=(ROTARY_BUFFER, r"\.attn\.logn_tensor$"),
)

_QWEN3_WEIGHTS: Final = WeightNames(names=LLAMA_NAMES | QK_NORMS, ignored=IGNORED)

_SHARED_EXPERT: Final = "model.layers.{i}.mlp.shared_expert"
_QWEN2_MOE_WEIGHTS: Final = WeightNames(
    names={
        **MOE_NAMES,
        "layers.{i}.shared.gate": f"{_SHARED_EXPERT}.gate_proj",
        "layers.{i}.shared.up": f"{_SHARED_EXPERT}.up_proj",
        "layers.{i}.shared.down": f"{_SHARED_EXPERT}.down_proj",
        "layers.{i}.shared_gate": f"{_SHARED_EXPERT}_gate",
    },
    fused=MOE_STACKS,
    ignored=IGNORED,
)

QWEN1: Final = Family(
    "qwen",
    _qwen1,
    {**_QWEN, "max_position_embeddings": 8192},
    field_names={"max_position_embeddings": "seq_length"},
    weight_names=_QWEN1_WEIGHTS,
)

QWEN2: Final = Family("qwen2", _qwen2, _QWEN2, weight_names=LLAMA_WEIGHTS, gguf=GGUFFamily("qwen2", "Qwen2ForCausalLM"))

QWEN3: Final = Family(
    "qwen3",
    _qwen3,
    {**_QWEN2, "head_dim": 128},
    weight_names=_QWEN3_WEIGHTS,
    gguf=GGUFFamily("qwen3", "Qwen3ForCausalLM"),
)

QWEN2_MOE: Final = Family(
    "qwen2_moe",
    _qwen2_moe,
    {
        **_QWEN_MOE,
        "intermediate_size": 5632,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts_per_tok": 4,
        "num_experts": 60,
        "qkv_bias": True,
    },
    weight_names=_QWEN2_MOE_WEIGHTS,
    gguf=GGUFFamily("qwen2moe", "Qwen2MoeForCausalLM", lambda metadata: {"norm_topk_prob": False}),
)

QWEN3_MOE: Final = Family(
    "qwen3_moe",
    _qwen3_moe,
    {
        **_QWEN_MOE,
        "intermediate_size": 6144,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "num_experts": 128,
    },
    field_names={"num_experts": "num_local_experts"},
    weight_names=QK_NORM_MOE_WEIGHTS,
    gguf=GGUFFamily("qwen3moe", "Qwen3MoeForCausalLM", lambda metadata: {"norm_topk_prob": True}),
)
