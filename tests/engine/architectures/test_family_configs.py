"""config.json of every family, in the hub's older spelling and in transformers 5's, and with everything left out.

transformers is the judge: its config classes read the old spelling and write the new one, and know the defaults.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from stoker_common.errors import ModelError
from stoker_engine.architectures.families.registry import FAMILIES
from stoker_engine.architectures.model_config import ModelConfig

#: Families whose code is remote only: transformers has no config class for them.
REMOTE = {"qwen", "internlm2", "internlm3"}

#: Configs as the hub has them, in their older spelling (sizes as published, tokenizer fields left out).
HUB: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama-2-7b": (
        "LlamaForCausalLM",
        {
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "max_position_embeddings": 4096,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 32,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_scaling": None,
            "tie_word_embeddings": False,
            "torch_dtype": "float16",
            "vocab_size": 32000,
        },
    ),
    "Llama-3.1-8B": (
        "LlamaForCausalLM",
        {
            "model_type": "llama",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "max_position_embeddings": 131072,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "rope_theta": 500000.0,
            "torch_dtype": "bfloat16",
            "vocab_size": 128256,
            "eos_token_id": [128001, 128008, 128009],
        },
    ),
    "Mistral-7B-v0.1": (
        "MistralForCausalLM",
        {
            "model_type": "mistral",
            "max_position_embeddings": 32768,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_theta": 10000.0,
            "sliding_window": 4096,
            "torch_dtype": "bfloat16",
        },
    ),
    "Mistral-7B-v0.3": (
        "MistralForCausalLM",
        {"model_type": "mistral", "rope_theta": 1e6, "sliding_window": None, "vocab_size": 32768},
    ),
    "Qwen2.5-7B": (
        "Qwen2ForCausalLM",
        {
            "model_type": "qwen2",
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "max_position_embeddings": 131072,
            "max_window_layers": 28,
            "num_attention_heads": 28,
            "num_hidden_layers": 28,
            "num_key_value_heads": 4,
            "rope_theta": 1000000.0,
            "sliding_window": 131072,
            "use_sliding_window": False,
            "torch_dtype": "bfloat16",
            "vocab_size": 152064,
        },
    ),
    "Qwen2.5-7B with yarn": (
        "Qwen2ForCausalLM",
        {
            "model_type": "qwen2",
            "rope_theta": 1e6,
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        },
    ),
    "Qwen3-8B": (
        "Qwen3ForCausalLM",
        {
            "model_type": "qwen3",
            "attention_bias": False,
            "head_dim": 128,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "max_position_embeddings": 40960,
            "max_window_layers": 36,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": None,
            "use_sliding_window": False,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
        },
    ),
    "gemma-2b": (
        "GemmaForCausalLM",
        {
            "model_type": "gemma",
            "head_dim": 256,
            "hidden_size": 2048,
            "intermediate_size": 16384,
            "num_attention_heads": 8,
            "num_hidden_layers": 18,
            "num_key_value_heads": 1,
            "rope_theta": 10000.0,
            "torch_dtype": "bfloat16",
        },
    ),
    "gemma-2-9b": (
        "Gemma2ForCausalLM",
        {
            "model_type": "gemma2",
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 3584,
            "intermediate_size": 14336,
            "num_attention_heads": 16,
            "num_hidden_layers": 42,
            "num_key_value_heads": 8,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "torch_dtype": "float32",
        },
    ),
    "gemma-3-1b": (
        "Gemma3ForCausalLM",
        {
            "model_type": "gemma3_text",
            "attn_logit_softcapping": None,
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "rope_local_base_freq": 10000,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
            "vocab_size": 262144,
        },
    ),
    "gemma-3-4b's text": (
        "Gemma3ForCausalLM",
        {
            "model_type": "gemma3_text",
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
    ),
    "phi-2": (
        "PhiForCausalLM",
        {
            "model_type": "phi",
            "hidden_act": "gelu_new",
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "layer_norm_eps": 1e-05,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 32,
            "partial_rotary_factor": 0.4,
            "qk_layernorm": False,
            "rope_scaling": None,
            "rope_theta": 10000.0,
            "torch_dtype": "float16",
            "vocab_size": 51200,
        },
    ),
    "Phi-3-mini-128k": (
        "Phi3ForCausalLM",
        {
            "model_type": "phi3",
            "max_position_embeddings": 131072,
            "original_max_position_embeddings": 4096,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0 + i / 100 for i in range(48)],
                "long_factor": [1.0 + i for i in range(48)],
            },
            "rope_theta": 10000.0,
            "sliding_window": 262144,
        },
    ),
    "Phi-4-mini": (
        "Phi3ForCausalLM",
        {
            "model_type": "phi3",
            "hidden_size": 3072,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "original_max_position_embeddings": 4096,
            "partial_rotary_factor": 0.75,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0] * 48,
                "long_factor": [1.0 + i for i in range(48)],
            },
            "tie_word_embeddings": True,
        },
    ),
    "falcon-7b": (
        "FalconForCausalLM",
        {
            "model_type": "falcon",
            "alibi": False,
            "bias": False,
            "hidden_size": 4544,
            "layer_norm_epsilon": 1e-05,
            "multi_query": True,
            "new_decoder_architecture": False,
            "num_attention_heads": 71,
            "num_hidden_layers": 32,
            "parallel_attn": True,
            "torch_dtype": "bfloat16",
        },
    ),
    "falcon-40b": (
        "FalconForCausalLM",
        {
            "model_type": "falcon",
            "hidden_size": 8192,
            "multi_query": True,
            "new_decoder_architecture": True,
            "num_attention_heads": 128,
            "num_hidden_layers": 60,
            "num_kv_heads": 8,
            "parallel_attn": True,
        },
    ),
    "falcon-rw-1b": (
        "FalconForCausalLM",
        {
            "model_type": "falcon",
            "alibi": True,
            "bias": True,
            "hidden_size": 2048,
            "multi_query": False,
            "new_decoder_architecture": False,
            "num_attention_heads": 32,
            "num_hidden_layers": 24,
            "parallel_attn": False,
            "vocab_size": 50304,
        },
    ),
    "bloom-560m": (
        "BloomForCausalLM",
        {
            "model_type": "bloom",
            "apply_residual_connection_post_layernorm": False,
            "n_embed": 1024,
            "n_layer": 24,
            "num_attention_heads": 16,
            "seq_length": 2048,
            "vocab_size": 250880,
        },
    ),
    "mpt-7b": (
        "MptForCausalLM",
        {
            "model_type": "mpt",
            "attn_config": {
                "alibi": True,
                "alibi_bias_max": 8,
                "attn_impl": "torch",
                "attn_type": "multihead_attention",
                "attn_uses_sequence_id": False,
                "clip_qkv": None,
                "prefix_lm": False,
                "qk_ln": False,
                "softmax_scale": None,
            },
            "d_model": 4096,
            "expansion_ratio": 4,
            "logit_scale": None,
            "max_seq_len": 2048,
            "n_heads": 32,
            "n_layers": 32,
            "no_bias": True,
            "norm_type": "low_precision_layernorm",
            "vocab_size": 50432,
        },
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        {
            "model_type": "gpt2",
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-05,
            "n_ctx": 1024,
            "n_embd": 768,
            "n_head": 12,
            "n_layer": 12,
            "n_positions": 1024,
            "vocab_size": 50257,
        },
    ),
    "gpt-j-6b": (
        "GPTJForCausalLM",
        {
            "model_type": "gptj",
            "n_embd": 4096,
            "n_head": 16,
            "n_inner": None,
            "n_layer": 28,
            "n_positions": 2048,
            "rotary_dim": 64,
            "tie_word_embeddings": False,
        },
    ),
    "pythia-160m": (
        "GPTNeoXForCausalLM",
        {
            "model_type": "gpt_neox",
            "hidden_act": "gelu",
            "hidden_size": 768,
            "intermediate_size": 3072,
            "layer_norm_eps": 1e-05,
            "num_attention_heads": 12,
            "num_hidden_layers": 12,
            "rotary_emb_base": 20000,
            "rotary_pct": 0.5,
            "use_parallel_residual": True,
            "vocab_size": 50304,
        },
    ),
    "opt-350m": (
        "OPTForCausalLM",
        {
            "model_type": "opt",
            "_remove_final_layer_norm": False,
            "activation_function": "relu",
            "do_layer_norm_before": False,
            "ffn_dim": 4096,
            "hidden_size": 1024,
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "word_embed_proj_dim": 512,
        },
    ),
    "glm-4-9b-hf": (
        "GlmForCausalLM",
        {"model_type": "glm", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "max_position_embeddings": 8192},
    ),
    "GLM-4-9B-0414": (
        "Glm4ForCausalLM",
        {"model_type": "glm4", "attention_bias": False, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05},
    ),
    "c4ai-command-r-v01": (
        "CohereForCausalLM",
        {"model_type": "cohere", "rope_theta": 8000000.0, "use_qk_norm": False, "logit_scale": 0.0625},
    ),
    "c4ai-command-r7b": (
        "Cohere2ForCausalLM",
        {
            "model_type": "cohere2",
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_hidden_layers": 32,
            "logit_scale": 0.25,
            "rope_theta": 50000,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
    ),
    "granite-3.0-8b": (
        "GraniteForCausalLM",
        {
            "model_type": "granite",
            "attention_multiplier": 0.0078125,
            "embedding_multiplier": 12.0,
            "logits_scaling": 16.0,
            "residual_multiplier": 0.22,
            "num_key_value_heads": 8,
            "rope_theta": 10000,
            "tie_word_embeddings": True,
        },
    ),
    "OLMo-7B": ("OlmoForCausalLM", {"model_type": "olmo", "clip_qkv": 8.0, "rope_theta": 10000.0}),
    "OLMo-2-7B": ("Olmo2ForCausalLM", {"model_type": "olmo2", "rms_norm_eps": 1e-06, "rope_theta": 500000}),
    "starcoder2-3b": (
        "Starcoder2ForCausalLM",
        {
            "model_type": "starcoder2",
            "hidden_act": "gelu_pytorch_tanh",
            "max_position_embeddings": 16384,
            "norm_epsilon": 1e-05,
            "num_key_value_heads": 2,
            "rope_theta": 999999.4420358813,
            "sliding_window": 4096,
            "use_bias": True,
        },
    ),
    "stablelm-2-1.6b": (
        "StableLmForCausalLM",
        {
            "model_type": "stablelm",
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 24,
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000,
            "use_qkv_bias": True,
        },
    ),
}


def _without_names(config: ModelConfig) -> ModelConfig:
    return replace(config, architecture="", dtype="")


@pytest.mark.parametrize("name", HUB)
def test_the_hubs_spelling_means_what_transformers_makes_of_it(name: str) -> None:
    architecture, hub = HUB[name]
    given = {key: value for key, value in hub.items() if key not in ("model_type", "torch_dtype")}
    written = CONFIG_MAPPING[hub["model_type"]](**given).to_dict()
    ours = ModelConfig.from_dict({"architectures": [architecture], **hub})
    theirs = ModelConfig.from_dict({**written, "architectures": [architecture]})
    assert _without_names(ours) == _without_names(theirs)
    assert ours.dtype == hub.get("torch_dtype", "float32")


@pytest.mark.parametrize("architecture", FAMILIES)
def test_the_defaults_are_transformers(architecture: str) -> None:
    family = FAMILIES[architecture]
    if family.model_type in REMOTE:
        pytest.skip("its code is remote only")
    written = CONFIG_MAPPING[family.model_type]().to_dict()
    ours = ModelConfig.from_dict({"architectures": [architecture]})
    theirs = ModelConfig.from_dict({**written, "architectures": [architecture]})
    assert _without_names(ours) == _without_names(theirs)


def test_every_family_is_spelled_and_named() -> None:
    spelled = {FAMILIES[architecture].model_type for architecture, _ in HUB.values()}
    dense = {ModelConfig.from_dict({"architectures": [name]}).model_type for name in FAMILIES if _is_dense(name)}
    assert dense - spelled - REMOTE == set()


def test_the_documentation_names_every_architecture() -> None:
    table = (Path(__file__).parents[3] / "docs" / "guides" / "models.md").read_text().split("Any other decoder")[0]
    assert set(re.findall(r"`(\w+(?:ForCausalLM|LMHeadModel|ForConditionalGeneration))`", table)) == set(FAMILIES)


def _is_dense(architecture: str) -> bool:
    layers = ModelConfig.from_dict({"architectures": [architecture]}).layers
    return all(layer.moe is None and layer.attention.latent is None for layer in layers)


def test_phi_3_calls_longrope_by_its_first_names() -> None:
    architecture, hub = HUB["Phi-3-mini-128k"]

    def read(rope_type: str) -> ModelConfig:
        scaling = {**hub["rope_scaling"], "type": rope_type}
        return ModelConfig.from_dict({"architectures": [architecture], **hub, "rope_scaling": scaling})

    assert read("su") == read("yarn") == read("longrope")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"architectures": ["BertForMaskedLM"]}, "encoder"),
        ({"architectures": ["BertModel"]}, "not an autoregressive decoder"),
        ({"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}, "encoder-decoder"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "classifier"),
        ({"architectures": ["GemmaForCausalLM"], "use_bidirectional_attention": True}, "encoder"),
        ({"architectures": ["LlamaForCausalLM"], "rope_scaling": {"rope_type": "mrope"}}, "mrope"),
        ({"architectures": ["LlamaForCausalLM"], "num_attention_heads": 6, "num_key_value_heads": 4}, "multiple"),
        ({"architectures": ["LlamaForCausalLM"], "hidden_size": "large"}, "hidden_size must be a number"),
        ({"architectures": ["MptForCausalLM"], "attn_config": {"alibi": False}}, "alibi"),
        ({"architectures": ["MptForCausalLM"], "no_bias": False}, "no_bias"),
        ({"architectures": ["BloomForCausalLM"], "apply_residual_connection_post_layernorm": True}, "post_layernorm"),
        ({"architectures": ["GPT2LMHeadModel"], "add_cross_attention": True}, "add_cross_attention"),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["full_attention"]}, "layer_types names 1"),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["linear_attention"] * 32}, "linear_attention"),
        (
            {"architectures": ["Phi3ForCausalLM"], "rope_scaling": {"type": "longrope", "short_factor": [1.0]}},
            "short_factor must be a list of 48",
        ),
    ],
)
def test_what_a_family_lacks_is_refused_by_name(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        ModelConfig.from_dict(config)


@pytest.mark.parametrize(
    ("name", "default", "longest"),
    [
        ("Llama-3.1-8B", 131072, 131072),
        ("Phi-3-mini-128k", 4096, 131072),
        ("gemma-3-4b's text", 131072, 131072),
        ("Qwen2.5-7B with yarn", 131072, 131072),
        ("opt-350m", 2048, 2048),
    ],
)
def test_how_long_sequences_may_be(name: str, default: int, longest: int) -> None:
    architecture, hub = HUB[name]
    config = ModelConfig.from_dict({"architectures": [architecture], **hub})
    assert (config.default_model_len, config.longest_model_len) == (default, longest)


@pytest.mark.parametrize(("rope_type", "default"), [("linear", 8192), ("dynamic", 2048)])
def test_stretched_positions_reach_further(rope_type: str, default: int) -> None:
    config = ModelConfig.from_dict(
        {"architectures": ["LlamaForCausalLM"], "rope_scaling": {"type": rope_type, "factor": 4.0}}
    )
    assert (config.default_model_len, config.longest_model_len) == (default, 8192)
