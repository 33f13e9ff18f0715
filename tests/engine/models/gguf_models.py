"""Tiny models of transformers, one a family of GGUF, for `llama_cpp` to write."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 128
SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_OWN_HEADS = {**SIZES, "num_key_value_heads": 4}
_GEMMA = {**SIZES, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 20}
_GPT = {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 256}
_MPT = {"d_model": 48, "n_layers": 2, "n_heads": 4, "max_seq_len": 256}
_FALCON = {key: value for key, value in _OWN_HEADS.items() if key not in ("intermediate_size", "num_key_value_heads")}
_MIXTURE = {**SIZES, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_SHARED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1}
_LATENT = {"kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "q_lora_rank": 16}
_GROUPS = {"n_group": 4, "topk_group": 2}
_HALF = {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 150.0,
    "truncate": False,
}
_MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("bloom", {"hidden_size": 48, "n_layer": 2, "n_head": 4}),
    "cohere": ("cohere", SIZES),
    "cohere plus": ("cohere", {**SIZES, "use_qk_norm": True}),
    "cohere2": ("cohere2", {**SIZES, "num_hidden_layers": 5, "sliding_window": 20}),
    "dbrx": (
        "dbrx",
        {
            **_MPT,
            "attn_config": {"clip_qkv": 3.0, "kv_n_heads": 2, "rope_theta": 10000.0},
            "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
        },
    ),
    "deepseek_v2": ("deepseek_v2", {**_OWN_HEADS, **_SHARED, **_LATENT, "topk_method": "greedy"}),
    "deepseek_v2 groups": (
        "deepseek_v2",
        {**_OWN_HEADS, **_SHARED, **_LATENT, **_GROUPS, "topk_method": "group_limited_greedy", "q_lora_rank": None},
    ),
    "deepseek_v3": ("deepseek_v3", {**_OWN_HEADS, **_SHARED, **_LATENT, **_GROUPS}),
    "falcon 7b": ("falcon", {**_FALCON, "multi_query": True}),
    "falcon 40b": ("falcon", {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon 11b": (
        "falcon",
        {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "gemma": ("gemma", {**SIZES, "head_dim": 16}),
    "gemma2": ("gemma2", _GEMMA),
    "gemma3": ("gemma3_text", {**_GEMMA, "num_hidden_layers": 7}),
    "glm4": ("glm4", {**SIZES, "head_dim": 16, "pad_token_id": 0}),
    "glm4_moe": (
        "glm4_moe",
        {**SIZES, **_SHARED, **_GROUPS, "head_dim": 16, "use_qk_norm": True, "attention_bias": True},
    ),
    "gpt2": ("gpt2", _GPT),
    "gpt_neox": ("gpt_neox", _OWN_HEADS),
    "gpt_oss": (
        "gpt_oss",
        {
            **SIZES,
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 20,
            "rope_parameters": _YARN,
        },
    ),
    "gpt_neox sequential": ("gpt_neox", {**_OWN_HEADS, "use_parallel_residual": False}),
    "granite": ("granite", {**SIZES, **_MULTIPLIERS}),
    "granitemoe": ("granitemoe", {**SIZES, **_MULTIPLIERS, "num_local_experts": 4}),
    "llama": ("llama", SIZES),
    "llama biases": ("llama", {**SIZES, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama head_dim": ("llama", {**SIZES, "head_dim": 16}),
    "mixtral": ("mixtral", {**SIZES, "num_local_experts": 4}),
    "mpt": ("mpt", _MPT),
    "mpt clip": ("mpt", {**_MPT, "attn_config": {"clip_qkv": 0.7}}),
    "olmo": ("olmo", {**SIZES, "clip_qkv": 1.5, "pad_token_id": 0}),
    "olmo2": ("olmo2", {**SIZES, "pad_token_id": 0}),
    "olmoe": ("olmoe", {**_OWN_HEADS, "num_experts": 6, "num_experts_per_tok": 2, "pad_token_id": 0}),
    "phi": ("phi", {**_OWN_HEADS, **_HALF}),
    "phi3": ("phi3", {**SIZES, "sliding_window": 20, "pad_token_id": 0}),
    "qwen2": ("qwen2", SIZES),
    "qwen2_moe": ("qwen2_moe", {**_MIXTURE, "shared_expert_intermediate_size": 40}),
    "qwen3": ("qwen3", {**SIZES, "head_dim": 16}),
    "qwen3_moe": ("qwen3_moe", {**_MIXTURE, "head_dim": 16, "norm_topk_prob": True}),
    "stablelm": ("stablelm", {**SIZES, **_HALF, "use_qkv_bias": True}),
    "stablelm 12b": ("stablelm", {**SIZES, **_HALF, "qk_layernorm": True, "use_parallel_residual": True}),
    "starcoder2": ("starcoder2", {**SIZES, "sliding_window": 20}),
}


def tiny(model_type: str, options: dict[str, Any]) -> PreTrainedModel:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](**{"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 1, **options})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    for parameter in model.parameters():
        width = 0.1 if model_type == "dbrx" else 0.3
        parameter.data = torch.randn_like(parameter) * width + (parameter.data if parameter.dim() == 1 else 0)
    model.tie_weights()
    return model
