"""GGUF architectures: their families, and the config.json that corresponds to a file's metadata."""

from __future__ import annotations

from typing import Any, Final

from stoker_common.errors import ModelError
from stoker_engine.architectures.families.family import GGUFFamily
from stoker_engine.architectures.families.registry import FAMILIES
from stoker_engine.architectures.gguf.gguf_metadata import Metadata, rope_scaling

#: config.json's field → GGUF key, for keys that are the same in all architectures.
_KEYS: Final = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "clip_qkv": "attention.clamp_kqv",
    "rope_theta": "rope.freq_base",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
    "first_k_dense_replace": "leading_dense_block_count",
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
    "use_parallel_residual": "use_parallel_residual",
}


def gguf_config(family: GGUFFamily, metadata: Metadata) -> dict[str, Any]:
    """Return the config.json that corresponds to a file's metadata.

    Raises:
        ModelError: a required key is missing, layers differ, or the RoPE scaling is not supported.
    """
    for key in ("block_count", "embedding_length", "attention.head_count"):
        if not metadata.get(key):
            raise ModelError(f"GGUF: the metadata lack {key}; the file is not a complete language model")
    stated = {name: metadata.get(key) for name, key in _KEYS.items()}
    per_layer = [_KEYS[name] for name, value in stated.items() if isinstance(value, list)]
    if per_layer:
        raise ModelError(f"GGUF: {', '.join(per_layer)} differ from layer to layer, which is not supported")
    config: dict[str, Any] = {name: value for name, value in stated.items() if value is not None}
    config["num_hidden_layers"] = int(metadata.get("block_count")) - int(metadata.get("nextn_predict_layers", 0))
    biased = any(metadata.has(f"blk.0.attn_{part}.bias") for part in ("q", "qkv", "kv_a_mqa"))
    config |= dict.fromkeys(("attention_bias", "qkv_bias", "use_qkv_bias", "bias"), biased)
    config |= {name: metadata.has("blk.0.ffn_up.bias") for name in ("mlp_bias", "use_bias")}
    config |= {name: metadata.has("blk.0.attn_q_norm.weight") for name in ("use_qk_norm", "qk_layernorm")}
    if "num_experts" in config:
        config["num_local_experts"] = config["n_routed_experts"] = config["num_experts"]
    head_dim = int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    rotated = metadata.get("rope.dimension_count")
    if rotated and not config.get("kv_lora_rank"):
        config["partial_rotary_factor"] = int(rotated) / head_dim
    return config | rope_scaling(metadata) | family.config(metadata)


def gguf_family(name: str, metadata: Metadata) -> GGUFFamily:
    """Return the family of a file with GGUF's architecture `name`.

    Raises:
        ModelError: the architecture is not supported.
    """
    known = [family.gguf for family in FAMILIES.values() if family.gguf is not None]
    for family in known:
        if family.name == name and family.describes(metadata):
            return family
    supported = ", ".join(sorted({family.name for family in known}))
    raise ModelError(f"GGUF architecture {name!r} is not supported; supported are {supported}")
