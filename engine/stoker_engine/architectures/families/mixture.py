"""Decoders whose MLPs are mixtures of experts: Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE, Granite-MoE, GLM-4.5, DBRX.

Attention is that of the family each one grew from; the router's kind is stated in `architectures.moe_config`'s terms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from stoker_engine.architectures.config_fields import MIN_POSITIVE, Fields
from stoker_engine.architectures.decoder_config import (
    AttentionConfig,
    DecoderConfig,
    LayerConfig,
    MLPConfig,
    NormConfig,
    QKNormConfig,
)
from stoker_engine.architectures.families.family_config import FamilyConfig
from stoker_engine.architectures.families.llama import (
    GRANITE_DEFAULTS,
    QWEN2_DEFAULTS,
    granite_attention,
    granite_decoder,
    qwen3_attention,
)
from stoker_engine.architectures.families.reading import (
    alike,
    attention,
    head_dim,
    layer_kinds,
    mlp,
    num_heads,
    rms_norm,
    windowed,
)
from stoker_engine.architectures.moe_config import MoEConfig
from stoker_engine.architectures.rope_config import read_rope


def sparse(
    layers: tuple[LayerConfig, ...], moe: MoEConfig, is_sparse: Callable[[int], bool]
) -> tuple[LayerConfig, ...]:
    """`layers`, with `moe` in the MLP's place where `is_sparse` says so of a layer's index."""
    return tuple(replace(layer, moe=moe) if is_sparse(index) else layer for index, layer in enumerate(layers))


def sigmoid_moe(c: Fields) -> MoEConfig:
    """DeepSeek-V3's mixture: sigmoid scores, a correction bias, groups, shared experts."""
    groups = c.optional_integer("n_group") or 1
    return MoEConfig(
        num_experts=c.integer("n_routed_experts"),
        num_experts_per_tok=c.integer("num_experts_per_tok"),
        intermediate_size=c.integer("moe_intermediate_size"),
        scoring="sigmoid",
        normalize=1.0 if c.flag("norm_topk_prob") else None,
        correction_bias=True,
        num_groups=groups,
        topk_groups=c.optional_integer("topk_group") or groups,
        group_score="top2",
        routed_scaling_factor=c.number("routed_scaling_factor"),
        shared_intermediate_size=(c.optional_integer("n_shared_experts") or 0) * c.integer("moe_intermediate_size"),
    )


def _rotated(c: Fields, heads: AttentionConfig) -> AttentionConfig:
    return replace(heads, rope=read_rope(c, heads.head_dim))


def _mixtral(c: Fields) -> DecoderConfig:
    heads = windowed(c, _rotated(c, attention(c)), "sliding_attention")
    return DecoderConfig(rms_norm(c), sparse(alike(c, heads, mlp(c)), _softmax(c, "num_local_experts"), _always))


def _olmoe(c: Fields) -> DecoderConfig:
    bias = c.flag("attention_bias")
    norm = rms_norm(c)
    heads = replace(
        _rotated(c, attention(c, qkv_bias=bias, out_bias=bias)),
        qk_norm=QKNormConfig(norm, "full"),
        clip_qkv=c.optional("clip_qkv", least=0),
    )
    return DecoderConfig(norm, sparse(alike(c, heads, mlp(c)), _softmax(c), _always))


def _granite(c: Fields) -> DecoderConfig:
    layers = alike(c, granite_attention(c), mlp(c))
    return granite_decoder(c, sparse(layers, _softmax(c, "num_local_experts"), _always))


def _qwen2(c: Fields) -> DecoderConfig:
    heads = _rotated(c, attention(c, qkv_bias=c.flag("qkv_bias")))
    slides = c.flag("use_sliding_window")
    kinds = layer_kinds(c, lambda index: slides and index % 2 == 0 and index < c.integer("max_window_layers", least=0))
    layers = tuple(LayerConfig(windowed(c, heads, kind) if slides else heads, mlp(c)) for kind in kinds)
    moe = _softmax(c, size="moe_intermediate_size")
    moe = replace(moe, shared_intermediate_size=c.integer("shared_expert_intermediate_size"), shared_gate=True)
    return DecoderConfig(rms_norm(c), sparse(layers, moe, _qwen_sparse(c)))


def _qwen3(c: Fields) -> DecoderConfig:
    heads = _rotated(c, qwen3_attention(c))
    if c.flag("use_sliding_window"):
        heads = windowed(c, heads, "sliding_attention")
    moe = _softmax(c, size="moe_intermediate_size")
    return DecoderConfig(rms_norm(c), sparse(alike(c, heads, mlp(c)), moe, _qwen_sparse(c)))


def _qwen_sparse(c: Fields) -> Callable[[int], bool]:
    """Every ``decoder_sparse_step``-th layer is a mixture, but those in ``mlp_only_layers``."""
    step, dense = c.integer("decoder_sparse_step"), set(c.items("mlp_only_layers", int))
    return lambda index: index not in dense and (index + 1) % step == 0


def _glm4(c: Fields) -> DecoderConfig:
    heads = _rotated(c, attention(c, qkv_bias=c.flag("attention_bias")))
    if c.flag("use_qk_norm"):
        heads = replace(heads, qk_norm=QKNormConfig(rms_norm(c), "head"))
    first = c.integer("first_k_dense_replace", least=0)
    return DecoderConfig(rms_norm(c), sparse(alike(c, heads, mlp(c)), sigmoid_moe(c), lambda index: index >= first))


def _dbrx(c: Fields) -> DecoderConfig:
    inner, experts = _part(c, "attn_config"), _part(c, "ffn_config")
    heads, size = num_heads(c), head_dim(c)
    # Files of the hub state the base beside the heads; transformers 5's conversion of them adds one that it made up.
    stated = Fields({"rope_theta": inner.get("rope_theta")}, {})
    rope = read_rope(c if inner.get("rope_theta") is None else stated, size)
    sees = AttentionConfig(
        heads, inner.integer("kv_n_heads"), size, size**-0.5, rope, clip_qkv=inner.optional("clip_qkv", least=0)
    )
    act = Fields(experts.object("ffn_act_fn"), {"name": "silu"}).text("name")
    moe = MoEConfig(
        num_experts=experts.integer("moe_num_experts"),
        num_experts_per_tok=experts.integer("moe_top_k"),
        intermediate_size=experts.integer("ffn_hidden_size"),
        normalize=experts.optional("moe_normalize_expert_weights", least=MIN_POSITIVE),
    )
    layers = alike(c, sees, MLPConfig(moe.intermediate_size, act))
    return DecoderConfig(NormConfig("layer", eps=1e-5), sparse(layers, moe, _always))


def _part(c: Fields, name: str) -> Fields:
    """A config within the config."""
    return Fields(c.object(name), _DBRX_PARTS[name])


def _softmax(c: Fields, experts: str = "num_experts", size: str = "intermediate_size") -> MoEConfig:
    """A mixture with softmax scores; `experts` is the field that counts them, `size` that of the inner size of each."""
    return MoEConfig(
        num_experts=c.integer(experts),
        num_experts_per_tok=c.integer("num_experts_per_tok"),
        intermediate_size=c.integer(size),
        normalize=1.0 if c.flag("norm_topk_prob") else None,
    )


def _always(index: int) -> bool:
    return True


_DBRX_PARTS: Final[dict[str, dict[str, Any]]] = {
    "attn_config": {"kv_n_heads": 1},
    "ffn_config": {
        "ffn_hidden_size": 3584,
        "moe_num_experts": 4,
        "moe_top_k": 1,
        "moe_normalize_expert_weights": 1.0,
    },
}

MIXTRAL: Final = FamilyConfig(
    "mixtral",
    _mixtral,
    {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "sliding_window": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,  # no field of the family's; its routers always do
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    },
)
_QWEN_MOE: Final = {
    **QWEN2_DEFAULTS,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "decoder_sparse_step": 1,
    "norm_topk_prob": False,
}
QWEN2_MOE: Final = FamilyConfig(
    "qwen2_moe",
    _qwen2,
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
)
QWEN3_MOE: Final = FamilyConfig(
    "qwen3_moe",
    _qwen3,
    {
        **_QWEN_MOE,
        "intermediate_size": 6144,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "num_experts": 128,
    },
    names={"num_experts": "num_local_experts"},
)
OLMOE: Final = FamilyConfig(
    "olmoe",
    _olmoe,
    {
        "vocab_size": 50_304,
        "hidden_size": 2048,
        "intermediate_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "num_experts_per_tok": 8,
        "num_experts": 64,
        "norm_topk_prob": False,
        "eos_token_id": 50_279,
        "tie_word_embeddings": False,
    },
)
GRANITE_MOE: Final = FamilyConfig(
    "granitemoe",
    _granite,
    {**GRANITE_DEFAULTS, "num_local_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True},
)
GLM4_MOE: Final = FamilyConfig(
    "glm4_moe",
    _glm4,
    {
        "vocab_size": 151_552,
        "hidden_size": 4096,
        "intermediate_size": 10_944,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.5,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_routed_experts": 128,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "use_qk_norm": False,
        "tie_word_embeddings": False,
    },
)
DBRX: Final = FamilyConfig(
    "dbrx",
    _dbrx,
    {
        "vocab_size": 32_000,
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "max_position_embeddings": 2048,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
    },
)
