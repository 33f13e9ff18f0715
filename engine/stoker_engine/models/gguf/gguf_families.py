"""GGUF's architectures: which of ours each one is, and how its metadata state what config.json would.

The metadata's keys are llama.cpp's. What they leave out, because llama.cpp knows it of an architecture, is said here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch

from stoker_common.errors import ModelError
from stoker_engine.models.families.weight_names import Fused
from stoker_engine.models.gguf.gguf_names import FUSED_GATE_UP, FUSED_HEAD_NORMS


class Metadata(Protocol):
    """What a GGUF file says of its model."""

    def get(self, key: str, default: Any = None) -> Any:
        """The value of ``{architecture}.{key}``."""
        ...

    def has(self, tensor: str) -> bool:
        """Whether the file holds that tensor."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """That tensor."""
        ...


@dataclass(frozen=True)
class GGUFFamily:
    """One architecture of GGUF.

    Attributes:
        architecture: ours.
        config: further fields of config.json, from the metadata.
        rotated: queries' and keys' rows are turned (`models.gguf.gguf_names`).
        names: the names that differ from the vocabulary.
        fused: the tensors that hold several slots, beyond those of all families.
    """

    architecture: str
    config: Callable[[Metadata], dict[str, Any]] = lambda metadata: {}
    rotated: bool = False
    names: Callable[[Metadata], dict[str, str]] = lambda metadata: {}
    fused: Mapping[str, Fused] = field(default_factory=dict)


#: config.json's names for what all architectures state under the same key.
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


def config_of(family: GGUFFamily, metadata: Metadata) -> dict[str, Any]:
    """The file's config.json.

    Raises:
        ModelError: a key is missing, layers differ in size, or positions are stretched in a way that is not read.
    """
    for key in ("block_count", "embedding_length", "attention.head_count"):
        if not metadata.get(key):
            raise ModelError(f"GGUF: the metadata lack {key}, so this is no complete language model")
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
    return config | _stretched(metadata, head_dim) | family.config(metadata)


def _stretched(metadata: Metadata, head_dim: int) -> dict[str, Any]:
    """How positions are stretched, as ``rope_scaling``."""
    kind = metadata.get("rope.scaling.type")
    if metadata.has("rope_factors_long.weight"):  # Phi-3's longrope, whatever the type says
        return {
            "original_max_position_embeddings": int(metadata.get("rope.scaling.original_context_length")),
            "rope_scaling": {
                "rope_type": "longrope",
                "short_factor": metadata.read("rope_factors_short.weight").tolist(),
                "long_factor": metadata.read("rope_factors_long.weight").tolist(),
                "attention_factor": metadata.get("rope.scaling.attn_factor"),
            },
        }
    if metadata.has("rope_freqs.weight"):
        # Llama 3.1's blend, worked out by the converter: one factor a pair, the same at every length.
        factors = metadata.read("rope_freqs.weight").tolist()
        scaling = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
        return {"rope_scaling": {**scaling, "original_max_position_embeddings": metadata.get("context_length")}}
    if kind in (None, "none"):
        return {}
    factor = float(metadata.get("rope.scaling.factor"))
    if kind == "linear":
        return {"rope_scaling": {"rope_type": "linear", "factor": factor}}
    if kind == "yarn":
        original = metadata.get("rope.scaling.original_context_length")
        scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        if log_multiplier := metadata.get("rope.scaling.yarn_log_multiplier"):  # DeepSeek's: 0.1 × mscale_all_dim
            scaling |= {"mscale": 10 * log_multiplier, "mscale_all_dim": 10 * log_multiplier}
        return {"rope_scaling": scaling}
    raise ModelError(f"GGUF: rope scaling {kind!r} is not supported; supported are linear, yarn and longrope")


def _gemma_scale(layers_of_27b: int) -> Callable[[Metadata], dict[str, Any]]:
    """The scores' scale: that of a head, but in the 27B models that of a share of the hidden size."""

    def config(metadata: Metadata) -> dict[str, Any]:
        size = metadata.get("attention.key_length")
        if metadata.get("block_count") == layers_of_27b:
            size = metadata.get("embedding_length") // metadata.get("attention.head_count")
        return {"query_pre_attn_scalar": size}

    return config


def _falcon(metadata: Metadata) -> dict[str, Any]:
    kv_heads = metadata.get("attention.head_count_kv", 1)
    return {
        "num_kv_heads": kv_heads,
        "multi_query": kv_heads == 1,
        "new_decoder_architecture": kv_heads != 1,
        "num_ln_in_parallel_attn": 2 if metadata.has("blk.0.attn_norm_2.weight") else 1,
    }


def _falcon_names(metadata: Metadata) -> dict[str, str]:
    if not metadata.has("blk.0.attn_norm_2.weight"):
        return {}
    return {"layers.{i}.input_norm": "blk.{i}.attn_norm_2", "layers.{i}.pre_mlp_norm": "blk.{i}.attn_norm"}


def _mpt(metadata: Metadata) -> dict[str, Any]:
    stated = {
        "clip_qkv": metadata.get("attention.clamp_kqv"),
        "alibi_bias_max": metadata.get("attention.max_alibi_bias"),
    }
    return {"attn_config": {key: value for key, value in stated.items() if value}}


def _command(metadata: Metadata) -> dict[str, Any]:
    return {"logit_scale": metadata.get("logit_scale")}


def _granite(metadata: Metadata) -> dict[str, Any]:
    stated = {
        "embedding_multiplier": metadata.get("embedding_scale"),
        "residual_multiplier": metadata.get("residual_scale"),
        "attention_multiplier": metadata.get("attention.scale"),
        "logits_scaling": metadata.get("logit_scale"),
    }
    return {key: value for key, value in stated.items() if value is not None}


def _dbrx(metadata: Metadata) -> dict[str, Any]:
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


def _deepseek(metadata: Metadata) -> dict[str, Any]:
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


def _gpt_oss(metadata: Metadata) -> dict[str, Any]:
    stretched = _stretched(metadata, 0).get("rope_scaling", {"rope_type": "default"})
    return {"rope_scaling": {**stretched, "truncate": False}}


def _has_sigmoid(metadata: Metadata) -> bool:
    return bool(metadata.get("expert_gating_func", 1) == 2)


def family_of(name: str, metadata: Metadata) -> GGUFFamily:
    """The family of GGUF's architecture `name`.

    Raises:
        ModelError: none here.
    """
    if name == "llama" and metadata.get("expert_count"):
        name = "mixtral"
    if name == "deepseek2" and _has_sigmoid(metadata):
        name = "deepseek3"
    if name not in _FAMILIES:
        supported = ", ".join(sorted(_FAMILIES.keys() - {"mixtral", "deepseek3"}))
        raise ModelError(f"GGUF architecture {name!r} is not supported; supported are {supported}")
    return _FAMILIES[name]


_FAMILIES: Final[dict[str, GGUFFamily]] = {
    "bloom": GGUFFamily("BloomForCausalLM"),
    "cohere2": GGUFFamily("Cohere2ForCausalLM", _command),
    "command-r": GGUFFamily("CohereForCausalLM", _command, fused=FUSED_HEAD_NORMS),
    "dbrx": GGUFFamily(
        "DbrxForCausalLM", _dbrx, names=lambda metadata: {"layers.{i}.pre_mlp_norm": "blk.{i}.attn_output_norm"}
    ),
    "deepseek2": GGUFFamily("DeepseekV2ForCausalLM", _deepseek),
    "deepseek3": GGUFFamily("DeepseekV3ForCausalLM", _deepseek),
    "falcon": GGUFFamily("FalconForCausalLM", _falcon, names=_falcon_names),
    "gemma": GGUFFamily("GemmaForCausalLM"),
    "gemma2": GGUFFamily("Gemma2ForCausalLM", _gemma_scale(46)),
    "gemma3": GGUFFamily("Gemma3ForCausalLM", _gemma_scale(62)),
    "glm4": GGUFFamily("Glm4ForCausalLM", fused=FUSED_GATE_UP),
    "glm4moe": GGUFFamily(
        "Glm4MoeForCausalLM", names=lambda metadata: {"layers.{i}.pre_mlp_norm": "blk.{i}.post_attention_norm"}
    ),
    "gpt2": GGUFFamily("GPT2LMHeadModel"),
    "gpt-oss": GGUFFamily(
        "GptOssForCausalLM",
        _gpt_oss,
        names=lambda metadata: {"layers.{i}.pre_mlp_norm": "blk.{i}.post_attention_norm"},
    ),
    "gptneox": GGUFFamily("GPTNeoXForCausalLM"),
    "granite": GGUFFamily("GraniteForCausalLM", _granite, rotated=True),
    "granitemoe": GGUFFamily("GraniteMoeForCausalLM", _granite, rotated=True),
    "internlm2": GGUFFamily("InternLM2ForCausalLM", rotated=True),
    "llama": GGUFFamily("LlamaForCausalLM", rotated=True),
    "mixtral": GGUFFamily("MixtralForCausalLM", rotated=True),
    "mpt": GGUFFamily("MptForCausalLM", _mpt),
    "olmo": GGUFFamily("OlmoForCausalLM", rotated=True),
    "olmo2": GGUFFamily("Olmo2ForCausalLM"),
    "olmoe": GGUFFamily("OlmoeForCausalLM"),
    "phi2": GGUFFamily("PhiForCausalLM", lambda metadata: {"qk_layernorm": False}),
    "phi3": GGUFFamily("Phi3ForCausalLM", fused=FUSED_GATE_UP),
    "qwen2": GGUFFamily("Qwen2ForCausalLM"),
    "qwen2moe": GGUFFamily("Qwen2MoeForCausalLM", lambda metadata: {"norm_topk_prob": False}),
    "qwen3": GGUFFamily("Qwen3ForCausalLM"),
    "qwen3moe": GGUFFamily("Qwen3MoeForCausalLM", lambda metadata: {"norm_topk_prob": True}),
    "stablelm": GGUFFamily("StableLmForCausalLM", fused=FUSED_HEAD_NORMS),
    "starcoder2": GGUFFamily("Starcoder2ForCausalLM"),
}
