"""config.json of mixtures of experts from the hub, compared with transformers, which reads and writes them.

Published sizes are checked by the total number of weights, in billions, as stated in the model cards.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.sizing.weight_sizes import weight_bytes

_V2: dict[str, Any] = {
    "model_type": "deepseek_v2",
    "attention_bias": False,
    "aux_loss_alpha": 0.001,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_layer_freq": 1,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_experts_per_tok": 6,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "scoring_func": "softmax",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 102400,
}

#: By name: architecture, config, weights in billions.
HUB: dict[str, tuple[str, dict[str, Any], float]] = {
    "Mixtral-8x7B": (
        "MixtralForCausalLM",
        {
            "model_type": "mixtral",
            "eos_token_id": 2,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "max_position_embeddings": 32768,
            "num_attention_heads": 32,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "rms_norm_eps": 1e-05,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "vocab_size": 32000,
        },
        46.7,
    ),
    "Qwen1.5-MoE-A2.7B": (
        "Qwen2MoeForCausalLM",
        {
            "model_type": "qwen2_moe",
            "decoder_sparse_step": 1,
            "eos_token_id": 151643,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "max_position_embeddings": 8192,
            "max_window_layers": 21,
            "moe_intermediate_size": 1408,
            "norm_topk_prob": False,
            "num_attention_heads": 16,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 24,
            "num_key_value_heads": 16,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0,
            "shared_expert_intermediate_size": 5632,
            "sliding_window": 32768,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
        14.3,
    ),
    "Qwen3-30B-A3B": (
        "Qwen3MoeForCausalLM",
        {
            "model_type": "qwen3_moe",
            "attention_bias": False,
            "decoder_sparse_step": 1,
            "eos_token_id": 151645,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "max_position_embeddings": 40960,
            "max_window_layers": 48,
            "mlp_only_layers": [],
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "num_attention_heads": 32,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
        30.5,
    ),
    "OLMoE-1B-7B": (
        "OlmoeForCausalLM",
        {
            "model_type": "olmoe",
            "attention_bias": False,
            "clip_qkv": None,
            "eos_token_id": 50279,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "intermediate_size": 1024,
            "max_position_embeddings": 4096,
            "norm_topk_prob": False,
            "num_attention_heads": 16,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 16,
            "num_key_value_heads": 16,
            "rope_scaling": None,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "vocab_size": 50304,
        },
        6.9,
    ),
    "granite-3.1-1b-a400m": (
        "GraniteMoeForCausalLM",
        {
            "model_type": "granitemoe",
            "attention_bias": False,
            "attention_multiplier": 0.015625,
            "embedding_multiplier": 12.0,
            "eos_token_id": 0,
            "hidden_act": "silu",
            "hidden_size": 1024,
            "intermediate_size": 512,
            "logits_scaling": 6.0,
            "max_position_embeddings": 131072,
            "num_attention_heads": 16,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 24,
            "num_key_value_heads": 8,
            "num_local_experts": 32,
            "residual_multiplier": 0.22,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1500000.0,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "vocab_size": 49155,
        },
        1.3,
    ),
    "GLM-4.5-Air": (
        "Glm4MoeForCausalLM",
        {
            "model_type": "glm4_moe",
            "attention_bias": True,
            "eos_token_id": [151329, 151336, 151338],
            "first_k_dense_replace": 1,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 10944,
            "max_position_embeddings": 131072,
            "moe_intermediate_size": 1408,
            "n_group": 1,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_attention_heads": 96,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 46,
            "num_key_value_heads": 8,
            "num_nextn_predict_layers": 1,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-05,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "routed_scaling_factor": 1.0,
            "tie_word_embeddings": False,
            "topk_group": 1,
            "torch_dtype": "bfloat16",
            "use_qk_norm": False,
            "vocab_size": 151552,
        },
        106.9,
    ),
    "DeepSeek-V2-Lite": (
        "DeepseekV2ForCausalLM",
        {
            **_V2,
            "hidden_size": 2048,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "n_group": 1,
            "n_routed_experts": 64,
            "num_attention_heads": 16,
            "num_hidden_layers": 27,
            "num_key_value_heads": 16,
            "q_lora_rank": None,
            "routed_scaling_factor": 1.0,
            "topk_group": 1,
            "topk_method": "greedy",
        },
        15.7,
    ),
    "DeepSeek-V2": (
        "DeepseekV2ForCausalLM",
        {
            **_V2,
            "hidden_size": 5120,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
            "n_group": 8,
            "n_routed_experts": 160,
            "num_attention_heads": 128,
            "num_hidden_layers": 60,
            "num_key_value_heads": 128,
            "q_lora_rank": 1536,
            "routed_scaling_factor": 16.0,
            "topk_group": 3,
            "topk_method": "group_limited_greedy",
        },
        235.7,
    ),
    "DeepSeek-V3": (
        "DeepseekV3ForCausalLM",
        {
            "model_type": "deepseek_v3",
            "attention_bias": False,
            "eos_token_id": 1,
            "ep_size": 1,
            "first_k_dense_replace": 3,
            "hidden_act": "silu",
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "kv_lora_rank": 512,
            "max_position_embeddings": 163840,
            "moe_intermediate_size": 2048,
            "moe_layer_freq": 1,
            "n_group": 8,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_attention_heads": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 61,
            "num_key_value_heads": 128,
            "num_nextn_predict_layers": 1,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "rms_norm_eps": 1e-06,
            "rope_scaling": {**_V2["rope_scaling"], "mscale": 1.0, "mscale_all_dim": 1.0},
            "rope_theta": 10000,
            "routed_scaling_factor": 2.5,
            "scoring_func": "sigmoid",
            "tie_word_embeddings": False,
            "topk_group": 4,
            "topk_method": "noaux_tc",
            "torch_dtype": "bfloat16",
            "v_head_dim": 128,
            "vocab_size": 129280,
        },
        671.0,
    ),
    "dbrx-base": (
        "DbrxForCausalLM",
        {
            "model_type": "dbrx",
            "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "model_type": "", "rope_theta": 500000},
            "d_model": 6144,
            "ffn_config": {
                "ffn_hidden_size": 10752,
                "model_type": "",
                "moe_jitter_eps": 0.01,
                "moe_loss_weight": 0.05,
                "moe_num_experts": 16,
                "moe_top_k": 4,
            },
            "max_seq_len": 32768,
            "n_heads": 48,
            "n_layers": 40,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "vocab_size": 100352,
        },
        131.6,
    ),
}


@pytest.mark.parametrize("name", HUB)
def test_hub_and_transformers_5_spellings_give_equal_configs(name: str) -> None:
    architecture, hub, _ = HUB[name]
    given = {key: value for key, value in hub.items() if key != "model_type"}
    written = CONFIG_MAPPING[hub["model_type"]](**given).to_dict()
    ours = ModelConfig.from_dict({"architectures": [architecture], **hub})
    theirs = ModelConfig.from_dict({**written, "architectures": [architecture]})
    if name.startswith("dbrx"):  # transformers writes no dtype for DBRX
        theirs = replace(theirs, dtype=ours.dtype)
    assert ours == theirs
    assert ours.dtype == "bfloat16"


@pytest.mark.parametrize("name", HUB)
def test_number_of_weights_equals_the_model_cards(name: str) -> None:
    architecture, hub, billions = HUB[name]
    config = ModelConfig.from_dict({"architectures": [architecture], **hub})
    assert weight_bytes(config, element_bytes=1) / 1e9 == pytest.approx(billions, abs=0.06)


def test_deepseek_caches_one_latent_vector_per_token() -> None:
    architecture, hub, _ = HUB["DeepSeek-V3"]
    config = ModelConfig.from_dict({"architectures": [architecture], **hub})
    assert {layer.cache.numbers_per_token for layer in config.layers} == {512 + 64}
    scale = config.layers[0].attention.scale
    assert scale == pytest.approx(192**-0.5 * 1.3688879**2)  # (0.1 ln 40 + 1)², as in the model's own code
