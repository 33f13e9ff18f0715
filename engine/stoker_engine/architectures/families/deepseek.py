"""DeepSeek-V2 and V3: latent attention; the first layers are dense, the others are mixtures of experts."""

from __future__ import annotations

from typing import Any, Final

from stoker_common.errors import ModelError
from stoker_engine.architectures.config_fields import Fields
from stoker_engine.architectures.decoder_config import AttentionConfig, DecoderConfig
from stoker_engine.architectures.families.family import Family, GGUFFamily
from stoker_engine.architectures.families.mixture import sigmoid_moe, sparse
from stoker_engine.architectures.families.reading import alike, mlp, num_heads, refuse, rms_norm
from stoker_engine.architectures.families.shared_weight_names import (
    IGNORED,
    LAYER,
    MOE_NAMES,
    MOE_STACKS,
    SHARED_EXPERTS,
)
from stoker_engine.architectures.gguf.gguf_metadata import Metadata
from stoker_engine.architectures.mla_config import MLAConfig
from stoker_engine.architectures.moe_config import MoEConfig
from stoker_engine.architectures.rope_config import read_rope, yarn_mscale
from stoker_engine.architectures.weight_layout import Fused, Split
from stoker_engine.architectures.weight_names import WeightNames


def _v2(c: Fields) -> DecoderConfig:
    # A true norm_topk_prob is not supported: the model's own code and transformers interpret it differently.
    refuse(c, norm_topk_prob=False, scoring_func="softmax", moe_layer_freq=1, mlp_bias=False)
    method = c.text("topk_method")
    if method not in ("greedy", "group_limited_greedy"):
        raise ModelError(f"config.json: topk_method {method!r} is not supported in this family")
    grouped = method == "group_limited_greedy"
    size = c.integer("moe_intermediate_size")
    moe = MoEConfig(
        num_experts=c.integer("n_routed_experts"),
        # transformers' config class has no default; all published models have 6.
        num_experts_per_tok=c.optional_integer("num_experts_per_tok") or 6,
        intermediate_size=size,
        normalize=None,
        num_groups=c.integer("n_group") if grouped else 1,
        topk_groups=c.integer("topk_group") if grouped else 1,
        routed_scaling_factor=c.number("routed_scaling_factor"),
        shared_intermediate_size=(c.optional_integer("n_shared_experts") or 0) * size,
    )
    return _decoder(c, moe, interleaved=True)


def _v3(c: Fields) -> DecoderConfig:
    refuse(c, scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
    return _decoder(c, sigmoid_moe(c), interleaved=c.flag("rope_interleave"))


def _decoder(c: Fields, moe: MoEConfig, *, interleaved: bool) -> DecoderConfig:
    first = c.integer("first_k_dense_replace", lower=0)
    layers = alike(c, _attention(c, interleaved), mlp(c))
    return DecoderConfig(rms_norm(c), sparse(layers, moe, lambda index: index >= first))


def _attention(c: Fields, interleaved: bool) -> AttentionConfig:
    latent = MLAConfig(
        q_lora_rank=c.optional_integer("q_lora_rank", lower=1),
        kv_lora_rank=c.integer("kv_lora_rank"),
        qk_nope_head_dim=c.integer("qk_nope_head_dim"),
        qk_rope_head_dim=c.integer("qk_rope_head_dim"),
        v_head_dim=c.integer("v_head_dim"),
    )
    rope = read_rope(c, latent.qk_rope_head_dim, interleaved=interleaved)
    scale = latent.qk_head_dim**-0.5
    # YaRN's scaling applies to queries and keys, so it is squared. cos and sin have another factor (`rope_config`).
    stated = Fields(c.object("rope_parameters") or c.object("rope_scaling"), {})
    if rope.rope_type != "default" and (all_dim := stated.optional("mscale_all_dim")):
        scale *= yarn_mscale(rope.factor, all_dim) ** 2
    heads, bias = num_heads(c), c.flag("attention_bias")
    return AttentionConfig(heads, heads, latent.qk_head_dim, scale, rope, qkv_bias=bias, out_bias=bias, latent=latent)


_COMMON: Final = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "tie_word_embeddings": False,
}

_MLA_NAMES: Final = {
    "layers.{i}.q_a": "model.layers.{i}.self_attn.q_a_proj",
    "layers.{i}.q_a_norm": "model.layers.{i}.self_attn.q_a_layernorm",
    "layers.{i}.q_b": "model.layers.{i}.self_attn.q_b_proj",
    "layers.{i}.kv_a": "model.layers.{i}.self_attn.kv_a_proj_with_mqa",
    "layers.{i}.kv_a_norm": "model.layers.{i}.self_attn.kv_a_layernorm",
}

_WEIGHTS: Final = WeightNames(
    names=MOE_NAMES | _MLA_NAMES | SHARED_EXPERTS,
    fused={
        **MOE_STACKS,
        "model.layers.{i}.self_attn.kv_b_proj": Fused(("layers.{i}.k_b", "layers.{i}.v_b"), Split.LATENT_HEADS),
    },
    ignored=IGNORED,
    layer=LAYER,
)


def _gguf_config(metadata: Metadata) -> dict[str, Any]:
    rope = int(metadata.get("rope.dimension_count"))
    key = metadata.get("attention.key_length_mla") or metadata.get("attention.key_length")
    value = metadata.get("attention.value_length_mla") or metadata.get("attention.value_length")
    groups = metadata.get("expert_group_count", 1)
    config = {
        "num_key_value_heads": metadata.get("attention.head_count"),
        "q_lora_rank": metadata.get("attention.q_lora_rank"),
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": key - rope,
        "v_head_dim": value,
        "n_group": groups,
        "topk_group": metadata.get("expert_group_used_count", groups),
        "topk_method": "noaux_tc",
    }
    if not _has_sigmoid(metadata):
        config |= {"topk_method": "group_limited_greedy" if groups > 1 else "greedy", "norm_topk_prob": False}
    return config


def _has_sigmoid(metadata: Metadata) -> bool:
    return bool(metadata.get("expert_gating_func", 1) == 2)


DEEPSEEK_V2: Final = Family(
    "deepseek_v2",
    _v2,
    {
        **_COMMON,
        "vocab_size": 102_400,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "first_k_dense_replace": 0,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "moe_intermediate_size": 1407,
        "eos_token_id": 2,
    },
    weight_names=_WEIGHTS,
    gguf=GGUFFamily(
        "deepseek2", "DeepseekV2ForCausalLM", _gguf_config, describes=lambda metadata: not _has_sigmoid(metadata)
    ),
)

DEEPSEEK_V3: Final = Family(
    "deepseek_v3",
    _v3,
    {
        **_COMMON,
        "vocab_size": 129_280,
        "hidden_size": 7168,
        "intermediate_size": 18_432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "max_position_embeddings": 4096,
        "n_shared_experts": 1,
        "n_routed_experts": 256,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "rope_interleave": True,
        "eos_token_id": 1,
    },
    weight_names=_WEIGHTS,
    gguf=GGUFFamily("deepseek2", "DeepseekV3ForCausalLM", _gguf_config, describes=_has_sigmoid),
)
