"""Configurations of tiny models shared by several tests, by transformers' names.

A configuration that is itself under test is defined in its test.
"""

from __future__ import annotations

from typing import Any, Final

#: transformers' model type, and the config without vocabulary and special tokens, which `tiny_models` adds.
Model = tuple[str, dict[str, Any]]

VOCABULARY: Final = 128

#: Small sizes, under most families' names; none is a multiple of 32.
SIZES: Final[dict[str, Any]] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
OWN_HEADS: Final = {**SIZES, "num_key_value_heads": 4}

#: Sizes that are multiples of 32.
BLOCK_SIZES: Final[dict[str, Any]] = {**SIZES, "hidden_size": 64, "intermediate_size": 96}

#: Sizes of models with a tokenizer of 512 tokens.
LLAMA_SIZES: Final[dict[str, Any]] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 1,
}

#: LongRoPE's factors for heads of 12.
LONGROPE_FACTORS: Final = {
    "short_factor": [1.0, 1.1, 1.3, 1.5, 1.9, 2.5],
    "long_factor": [1.0, 1.5, 2.5, 4.0, 6.0, 9.0],
}

_FALCON = {key: value for key, value in OWN_HEADS.items() if key not in ("intermediate_size", "num_key_value_heads")}
_GPT = {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 256}
_MPT = {"d_model": 48, "n_layers": 2, "n_heads": 4, "max_seq_len": 256}
_DBRX = {
    **_MPT,
    "attn_config": {"clip_qkv": 3.0, "kv_n_heads": 2, "rope_theta": 10000.0},
    "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
}
_MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
}
_ROPE = {"rope_theta": 10000.0}
_HALF_ROTATED = {"rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5}}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **_ROPE}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, **_ROPE}

_MIXTURE = {**SIZES, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1}
_LATENT = {"kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10}
_GROUPS = {"n_group": 4, "topk_group": 2}
_THREE = {**SIZES, "num_hidden_layers": 3}
_LATENT_MIXTURE = {**_THREE, "num_key_value_heads": 4, **_LATENT, **_ROUTED, **_GROUPS}

#: Dense models: all families, with their options.
FAMILIES: dict[str, Model] = {
    "llama": ("llama", SIZES),
    "llama biases": ("llama", {**SIZES, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama head_dim": ("llama", {**SIZES, "head_dim": 16}),
    "llama linear": ("llama", {**SIZES, "rope_parameters": {"rope_type": "linear", "factor": 4.0, **_ROPE}}),
    "llama 3": ("llama", {**SIZES, "rope_parameters": {**_LLAMA3, "original_max_position_embeddings": 64}}),
    "llama yarn": ("llama", {**SIZES, "rope_parameters": _YARN}),
    "llama yarn mscale": (
        "llama",
        {**SIZES, "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.7, "truncate": False}},
    ),
    "llama yarn factor": ("llama", {**SIZES, "rope_parameters": {**_YARN, "attention_factor": 1.3, "beta_fast": 16}}),
    "llama dynamic": ("llama", {**SIZES, "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, **_ROPE}}),
    "mistral": ("mistral", {**SIZES, "sliding_window": 20}),
    "mistral no window": ("mistral", {**SIZES, "sliding_window": None, "head_dim": 16}),
    "qwen2": ("qwen2", SIZES),
    "qwen2 window": ("qwen2", {**SIZES, "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "qwen3": ("qwen3", {**SIZES, "head_dim": 16}),
    "qwen3 bias": ("qwen3", {**SIZES, "head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
    "gemma": ("gemma", {**SIZES, "head_dim": 16}),
    "gemma2": ("gemma2", {**SIZES, "head_dim": 16, "sliding_window": 20, "query_pre_attn_scalar": 20}),
    "gemma2 no caps": (
        "gemma2",
        {**SIZES, "sliding_window": 20, "attn_logit_softcapping": None, "final_logit_softcapping": None, "head_dim": 8},
    ),
    "gemma3": ("gemma3_text", {**SIZES, "num_hidden_layers": 7, "head_dim": 16, "sliding_window": 20}),
    "phi": ("phi", {**OWN_HEADS, "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5}}),
    "phi qk": ("phi", {**SIZES, "qk_layernorm": True}),
    "phi3": ("phi3", {**SIZES, "sliding_window": 20, "pad_token_id": 0}),
    "phi4-mini": (
        "phi3",
        {
            **SIZES,
            "pad_token_id": 0,
            "tie_word_embeddings": True,
            "original_max_position_embeddings": 256,
            "rope_parameters": {"rope_type": "longrope", "partial_rotary_factor": 1.0, **_ROPE, **LONGROPE_FACTORS},
        },
    ),
    "falcon 7b": ("falcon", {**_FALCON, "multi_query": True}),
    "falcon 40b": ("falcon", {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon 11b": (
        "falcon",
        {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1, "bias": True},
    ),
    "falcon rw": ("falcon", {**_FALCON, "alibi": True, "bias": True, "multi_query": False, "parallel_attn": False}),
    "bloom": ("bloom", {"hidden_size": 48, "n_layer": 2, "n_head": 4}),
    "mpt": ("mpt", _MPT),
    "mpt clip": (
        "mpt",
        {"d_model": 48, "n_layers": 2, "n_heads": 3, "attn_config": {"clip_qkv": 0.7, "softmax_scale": 0.2}},
    ),
    "gpt2": ("gpt2", _GPT),
    "gpt2 scales": ("gpt2", {**_GPT, "n_layer": 3, "scale_attn_by_inverse_layer_idx": True}),
    "gptj": ("gptj", {**_GPT, "rotary_dim": 8}),
    "gpt_neox": ("gpt_neox", {**OWN_HEADS, "hidden_size": 64}),
    "gpt_neox odd": ("gpt_neox", {**OWN_HEADS, "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.25}}),
    "gpt_neox sequential": ("gpt_neox", {**OWN_HEADS, "use_parallel_residual": False, "attention_bias": False}),
    "opt": ("opt", {**_FALCON, "ffn_dim": 80, "word_embed_proj_dim": 48}),
    "opt 350m": ("opt", {**_FALCON, "ffn_dim": 80, "word_embed_proj_dim": 24, "do_layer_norm_before": False}),
    "opt bare": (
        "opt",
        {
            **_FALCON,
            "ffn_dim": 80,
            "word_embed_proj_dim": 48,
            "enable_bias": False,
            "layer_norm_elementwise_affine": False,
        },
    ),
    "glm": ("glm", {**SIZES, "head_dim": 16, "pad_token_id": 0}),
    "glm4": ("glm4", {**SIZES, "head_dim": 16, "pad_token_id": 0, "attention_bias": False}),
    "cohere": ("cohere", SIZES),
    "cohere plus": ("cohere", {**SIZES, "use_qk_norm": True, "attention_bias": True}),
    "cohere2": ("cohere2", {**SIZES, "num_hidden_layers": 5, "sliding_window": 20}),
    "granite": ("granite", {**SIZES, **_MULTIPLIERS}),
    "olmo": ("olmo", {**SIZES, "clip_qkv": 1.5, "pad_token_id": 0}),
    "olmo2": ("olmo2", {**SIZES, "pad_token_id": 0}),
    "starcoder2": ("starcoder2", {**SIZES, "sliding_window": 20}),
    "starcoder2 no bias": ("starcoder2", {**SIZES, "use_bias": False}),
    "stablelm": ("stablelm", {**SIZES, "hidden_size": 64, "use_qkv_bias": True}),
    "stablelm 12b": ("stablelm", {**SIZES, "hidden_size": 64, "qk_layernorm": True, "use_parallel_residual": True}),
}

#: Mixtures of experts, and latent attention.
MIXTURES: dict[str, Model] = {
    "mixtral": ("mixtral", {**_THREE, "num_local_experts": 4, "sliding_window": 20}),
    "qwen2_moe": (
        "qwen2_moe",
        {**_MIXTURE, "num_hidden_layers": 3, "shared_expert_intermediate_size": 40, "decoder_sparse_step": 2},
    ),
    "qwen2_moe window": (
        "qwen2_moe",
        {
            **_MIXTURE,
            **_THREE,
            "shared_expert_intermediate_size": 40,
            "norm_topk_prob": True,
            "qkv_bias": False,
            "use_sliding_window": True,
            "sliding_window": 20,
            "max_window_layers": 2,
        },
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {**_MIXTURE, "num_hidden_layers": 3, "head_dim": 16, "mlp_only_layers": [1], "norm_topk_prob": True},
    ),
    "olmoe": ("olmoe", {**_THREE, "num_experts": 6, "num_experts_per_tok": 2, "clip_qkv": 1.2, "pad_token_id": 0}),
    "granitemoe": (
        "granitemoe",
        {
            **_THREE,
            "num_local_experts": 4,
            "embedding_multiplier": 2.0,
            "logits_scaling": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.3,
        },
    ),
    "glm4_moe": (
        "glm4_moe",
        {
            **_LATENT_MIXTURE,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "use_qk_norm": True,
            "attention_bias": True,
            "routed_scaling_factor": 1.5,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            **_THREE,
            "head_dim": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": 20,
            "swiglu_limit": 2.0,
        },
    ),
    "gpt_oss plain": (
        "gpt_oss",
        {
            **_THREE,
            "head_dim": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "layer_types": ["full_attention"] * 3,
            "attention_bias": False,
            "swiglu_alpha": 1.1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        },
    ),
    "dbrx": ("dbrx", _DBRX),
    "deepseek_v2 lite": ("deepseek_v2", {**_LATENT_MIXTURE, "q_lora_rank": None, "topk_method": "greedy"}),
    "deepseek_v2": (
        "deepseek_v2",
        {
            **_LATENT_MIXTURE,
            "q_lora_rank": 16,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 2.0,
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {**_LATENT_MIXTURE, "q_lora_rank": 16, "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.7}},
    ),
    "deepseek_v3 bias": (
        "deepseek_v3",
        {**_LATENT_MIXTURE, "q_lora_rank": None, "attention_bias": True, "rope_interleave": False},
    ),
}

#: Models for GGUF files, which cannot store some fields.
_GGUF_GEMMA = {**SIZES, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 20}
_GGUF_YARN = {**_YARN, "rope_theta": 150.0, "truncate": False}
_ALSO_IN_GGUF = (
    "bloom",
    "cohere",
    "cohere2",
    "falcon 7b",
    "falcon 40b",
    "gemma",
    "gpt2",
    "granite",
    "llama",
    "llama biases",
    "llama head_dim",
    "mpt",
    "olmo",
    "olmo2",
    "phi",
    "phi3",
    "qwen2",
    "qwen3",
    "starcoder2",
)
GGUF: dict[str, Model] = {
    **{name: FAMILIES[name] for name in _ALSO_IN_GGUF},
    "cohere plus": ("cohere", {**SIZES, "use_qk_norm": True}),
    "dbrx": ("dbrx", _DBRX),
    "deepseek_v2": ("deepseek_v2", {**OWN_HEADS, **_ROUTED, **_LATENT, "q_lora_rank": 16, "topk_method": "greedy"}),
    "deepseek_v2 groups": (
        "deepseek_v2",
        {**OWN_HEADS, **_ROUTED, **_LATENT, **_GROUPS, "topk_method": "group_limited_greedy", "q_lora_rank": None},
    ),
    "deepseek_v3": ("deepseek_v3", {**OWN_HEADS, **_ROUTED, **_LATENT, **_GROUPS, "q_lora_rank": 16}),
    "falcon 11b": (
        "falcon",
        {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "gemma2": ("gemma2", _GGUF_GEMMA),
    "gemma3": ("gemma3_text", {**_GGUF_GEMMA, "num_hidden_layers": 7}),
    "glm4": ("glm4", {**SIZES, "head_dim": 16, "pad_token_id": 0}),
    "glm4_moe": (
        "glm4_moe",
        {**SIZES, **_ROUTED, **_GROUPS, "head_dim": 16, "use_qk_norm": True, "attention_bias": True},
    ),
    "gpt_neox": ("gpt_neox", OWN_HEADS),
    "gpt_oss": (
        "gpt_oss",
        {
            **SIZES,
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 20,
            "rope_parameters": _GGUF_YARN,
        },
    ),
    "gpt_neox sequential": ("gpt_neox", {**OWN_HEADS, "use_parallel_residual": False}),
    "granitemoe": ("granitemoe", {**SIZES, **_MULTIPLIERS, "num_local_experts": 4}),
    "mixtral": ("mixtral", {**SIZES, "num_local_experts": 4}),
    "mpt clip": ("mpt", {**_MPT, "attn_config": {"clip_qkv": 0.7}}),
    "olmoe": ("olmoe", {**OWN_HEADS, "num_experts": 6, "num_experts_per_tok": 2, "pad_token_id": 0}),
    "qwen2_moe": ("qwen2_moe", {**_MIXTURE, "shared_expert_intermediate_size": 40}),
    "qwen3_moe": ("qwen3_moe", {**_MIXTURE, "head_dim": 16, "norm_topk_prob": True}),
    "stablelm": ("stablelm", {**SIZES, **_HALF_ROTATED, "use_qkv_bias": True}),
    "stablelm 12b": ("stablelm", {**SIZES, **_HALF_ROTATED, "qk_layernorm": True, "use_parallel_residual": True}),
}
