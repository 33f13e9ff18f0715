"""DBRX: a mixture of experts, layer norms, clamped queries, keys and values."""

from __future__ import annotations

from typing import Any, Final

from stoker_engine.architectures.config_fields import MIN_POSITIVE, Fields
from stoker_engine.architectures.decoder_config import AttentionConfig, DecoderConfig, MLPConfig, NormConfig
from stoker_engine.architectures.families.family import Family, GGUFFamily
from stoker_engine.architectures.families.mixture import every_layer, sparse
from stoker_engine.architectures.families.reading import alike, head_dim, num_heads
from stoker_engine.architectures.families.shared_weight_names import QKV, expert_stack
from stoker_engine.architectures.gguf.gguf_metadata import Metadata
from stoker_engine.architectures.moe_config import MoEConfig
from stoker_engine.architectures.rope_config import read_rope
from stoker_engine.architectures.weight_layout import Fused, Split
from stoker_engine.architectures.weight_names import WeightNames


def _dbrx(c: Fields) -> DecoderConfig:
    inner, experts = _part(c, "attn_config"), _part(c, "ffn_config")
    heads, size = num_heads(c), head_dim(c)
    # Files on the hub state rope_theta in attn_config, which takes precedence: transformers 5's conversion of these
    # files adds a default to the outer config.
    stated = Fields({"rope_theta": inner.get("rope_theta")}, {})
    rope = read_rope(c if inner.get("rope_theta") is None else stated, size)
    sees = AttentionConfig(
        heads, inner.integer("kv_n_heads"), size, size**-0.5, rope, clip_qkv=inner.optional("clip_qkv", lower=0)
    )
    act = Fields(experts.object("ffn_act_fn"), {"name": "silu"}).text("name")
    moe = MoEConfig(
        num_experts=experts.integer("moe_num_experts"),
        num_experts_per_tok=experts.integer("moe_top_k"),
        intermediate_size=experts.integer("ffn_hidden_size"),
        normalize=experts.optional("moe_normalize_expert_weights", lower=MIN_POSITIVE),
    )
    layers = alike(c, sees, MLPConfig(moe.intermediate_size, act))
    return DecoderConfig(NormConfig("layer", eps=1e-5), sparse(layers, moe, every_layer))


def _part(c: Fields, name: str) -> Fields:
    """Return a nested config with its defaults."""
    return Fields(c.object(name), _PARTS[name])


_PARTS: Final[dict[str, dict[str, Any]]] = {
    "attn_config": {"kv_n_heads": 1},
    "ffn_config": {
        "ffn_hidden_size": 3584,
        "moe_num_experts": 4,
        "moe_top_k": 1,
        "moe_normalize_expert_weights": 1.0,
    },
}

_BLOCK: Final = "transformer.blocks.{i}"
_EXPERTS: Final = f"{_BLOCK}.ffn.experts.mlp"
_WEIGHTS: Final = WeightNames(
    names={
        "embed": "transformer.wte",
        "layers.{i}.input_norm": f"{_BLOCK}.norm_attn_norm.norm_1",
        "layers.{i}.o": f"{_BLOCK}.norm_attn_norm.attn.out_proj",
        "layers.{i}.pre_mlp_norm": f"{_BLOCK}.norm_attn_norm.norm_2",
        "layers.{i}.router": f"{_BLOCK}.ffn.router.layer",
        "final_norm": "transformer.norm_f",
        "lm_head": "lm_head",
    },
    fused={
        f"{_BLOCK}.norm_attn_norm.attn.Wqkv": Fused(QKV, Split.ROWS),
        f"{_EXPERTS}.w1": expert_stack("gate", split=Split.FLAT_EXPERTS),
        f"{_EXPERTS}.v1": expert_stack("up", split=Split.FLAT_EXPERTS),
        f"{_EXPERTS}.w2": expert_stack("down", split=Split.FLAT_EXPERTS, transposed=True),
    },
)


def _gguf_config(metadata: Metadata) -> dict[str, Any]:
    inner = {
        "kv_n_heads": metadata.get("attention.head_count_kv"),
        "clip_qkv": metadata.get("attention.clamp_kqv"),
        "rope_theta": metadata.get("rope.freq_base"),
    }
    experts = {
        "ffn_hidden_size": metadata.get("feed_forward_length"),
        "moe_num_experts": metadata.get("expert_count"),
        "moe_top_k": metadata.get("expert_used_count"),
    }
    return {"attn_config": inner, "ffn_config": experts}


DBRX: Final = Family(
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
    weight_names=_WEIGHTS,
    gguf=GGUFFamily(
        "dbrx",
        "DbrxForCausalLM",
        _gguf_config,
        names=lambda metadata: {"layers.{i}.pre_mlp_norm": "blk.{i}.attn_output_norm"},
    ),
)
