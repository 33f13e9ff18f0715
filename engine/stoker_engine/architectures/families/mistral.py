"""Mistral: Llama with a sliding window in every layer, unless ``sliding_window`` is null. Mixtral: with mixtures of
experts, and by default no window."""

from __future__ import annotations

from typing import Final

from stoker_engine.architectures.config_fields import Fields
from stoker_engine.architectures.decoder_config import DecoderConfig
from stoker_engine.architectures.families.family import Family, GGUFFamily
from stoker_engine.architectures.families.llama import LLAMA_DEFAULTS, pre_norm
from stoker_engine.architectures.families.mixture import every_layer, softmax_moe, sparse
from stoker_engine.architectures.families.reading import alike, attention, mlp, rms_norm, rotated, windowed
from stoker_engine.architectures.families.shared_weight_names import (
    IGNORED,
    LLAMA_NAMES,
    LLAMA_WEIGHTS,
    expert_names,
    expert_stacks,
)
from stoker_engine.architectures.weight_names import WeightNames


def _mistral(c: Fields) -> DecoderConfig:
    return pre_norm(c, windowed(c, attention(c), "sliding_attention"), mlp(c))


def _mixtral(c: Fields) -> DecoderConfig:
    heads = windowed(c, rotated(c, attention(c)), "sliding_attention")
    return DecoderConfig(rms_norm(c), sparse(alike(c, heads, mlp(c)), softmax_moe(c, "num_local_experts"), every_layer))


_MOE: Final = "model.layers.{i}.block_sparse_moe"
_MIXTRAL_WEIGHTS: Final = WeightNames(
    names={**LLAMA_NAMES, "layers.{i}.router": f"{_MOE}.gate", **expert_names(_MOE, "w1", "w3", "w2")},
    fused=expert_stacks(_MOE),
    renames=((r"\.mlp\.", ".block_sparse_moe."),),
    ignored=IGNORED,
)

MISTRAL: Final = Family(
    "mistral",
    _mistral,
    {
        **LLAMA_DEFAULTS,
        "intermediate_size": 14_336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
    },
    weight_names=LLAMA_WEIGHTS,
)

MIXTRAL: Final = Family(
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
        "norm_topk_prob": True,  # not a field of this family: its routers always normalize
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    },
    weight_names=_MIXTRAL_WEIGHTS,
    gguf=GGUFFamily(
        "llama", "MixtralForCausalLM", rotated=True, describes=lambda metadata: bool(metadata.get("expert_count"))
    ),
)
