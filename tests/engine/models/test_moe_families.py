"""Mixtures of experts and latent attention against transformers: logits and 64 greedy tokens, batched, chunked, cached.

Each checkpoint is read in both spellings: three matrices an expert, as the hub has them, and transformers 5's stacks.
Router weights are wide, so that two experts' scores are rarely close.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from stoker_common.errors import ModelError, WeightsError
from stoker_engine.architectures.model_config import ModelConfig
from stoker_engine.kernels.cpu.library import library
from stoker_engine.sizing.weight_sizes import weight_bytes

_VOCABULARY = 128
_SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_MIXTURE = {**_SIZES, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LATENT: dict[str, Any] = {
    **_SIZES,
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}
_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {**_SIZES, "num_local_experts": 4, "sliding_window": 20}),
    "qwen2_moe": ("qwen2_moe", {**_MIXTURE, "shared_expert_intermediate_size": 40, "decoder_sparse_step": 2}),
    "qwen2_moe window": (
        "qwen2_moe",
        {
            **_MIXTURE,
            "shared_expert_intermediate_size": 40,
            "norm_topk_prob": True,
            "qkv_bias": False,
            "use_sliding_window": True,
            "sliding_window": 20,
            "max_window_layers": 2,
        },
    ),
    "qwen3_moe": ("qwen3_moe", {**_MIXTURE, "head_dim": 16, "mlp_only_layers": [1], "norm_topk_prob": True}),
    "olmoe": ("olmoe", {**_SIZES, "num_experts": 6, "num_experts_per_tok": 2, "clip_qkv": 1.2, "pad_token_id": 0}),
    "granitemoe": (
        "granitemoe",
        {
            **_SIZES,
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
            **_LATENT,
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
            **_SIZES,
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
            **_SIZES,
            "head_dim": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "layer_types": ["full_attention"] * 3,
            "attention_bias": False,
            "swiglu_alpha": 1.1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        },
    ),
    "dbrx": (
        "dbrx",
        {
            "d_model": 48,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 256,
            "attn_config": {"clip_qkv": 3.0, "kv_n_heads": 2, "rope_theta": 10000.0},
            "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
        },
    ),
    "deepseek_v2 lite": ("deepseek_v2", {**_LATENT, "q_lora_rank": None, "topk_method": "greedy"}),
    "deepseek_v2": (
        "deepseek_v2",
        {
            **_LATENT,
            "q_lora_rank": 16,
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 2.0,
            "rope_parameters": _YARN,
        },
    ),
    "deepseek_v3": ("deepseek_v3", {**_LATENT, "q_lora_rank": 16, "rope_parameters": _YARN}),
    "deepseek_v3 bias": (
        "deepseek_v3",
        {**_LATENT, "q_lora_rank": None, "attention_bias": True, "rope_interleave": False},
    ),
}


def tiny(name: str) -> PreTrainedModel:
    """The tiny random model with that name in `MODELS`."""
    model_type, options = MODELS[name]
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](**{"vocab_size": _VOCABULARY, "bos_token_id": 0, "eos_token_id": 1, **options})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    width = 0.1 if model_type == "dbrx" else 0.3  # wider, and its own float32 is 1e-4 away from float64
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * width + (parameter.data if parameter.dim() == 1 else 0)
    for key, buffer in model.named_buffers():
        if key.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.3)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_family_equals_transformers(
    name: str, tmp_path: Path, decoder_of: Any, paged_run: Any, assert_run: Any
) -> None:
    theirs = tiny(name)
    theirs.save_pretrained(tmp_path)
    ours = decoder_of(tmp_path)
    assert weight_bytes(ours.config, 4) == sum(target.tensor.nbytes for target in ours.weight_targets().values())

    # transformers saves the hub's spelling; its modules hold the other one.
    save_file({key: tensor.contiguous() for key, tensor in theirs.state_dict().items()}, tmp_path / "model.safetensors")
    stacked = decoder_of(tmp_path).weight_targets()
    assert all(torch.equal(target.tensor, stacked[name].tensor) for name, target in ours.weight_targets().items())

    def reference(tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = theirs(torch.tensor([tokens])).logits[0]
        return logits

    rng = random.Random(1)
    prompts = [[rng.randrange(2, _VOCABULARY) for _ in range(length)] for length in (61, 9, 30, 1)]
    assert_run(paged_run(ours, prompts, new_tokens=64), reference)


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3"])
def test_a_missing_expert_is_an_error(name: str, tmp_path: Path, decoder_of: Any) -> None:
    tiny(name).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    lost = next(key for key in tensors if ".experts.1." in key)
    save_file({key: tensor for key, tensor in tensors.items() if key != lost}, file)
    with pytest.raises(WeightsError, match=r"lack 1 tensors.*experts\.1\."):
        decoder_of(tmp_path)


def test_layers_that_draft_are_left_out(tmp_path: Path, decoder_of: Any) -> None:
    tiny("deepseek_v3").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    draft = {"model.layers.3.eh_proj.weight": torch.zeros(2), "model.layers.3.mlp.gate.weight": torch.zeros(2)}
    save_file({**load_file(file), **draft}, file)
    decoder_of(tmp_path)


def test_dbrx_takes_the_rotary_base_that_the_hub_states_beside_the_heads() -> None:
    made_up = {"rope_theta": 10000.0, "rope_type": "default"}  # what transformers 5 adds when it saves the model
    stated = {"attn_config": {"rope_theta": 500000.0, "kv_n_heads": 8}, "rope_parameters": made_up}
    config = ModelConfig.from_dict({"architectures": ["DbrxForCausalLM"], **stated})
    assert config.layers[0].rope is not None and config.layers[0].rope.rope_theta == 500000.0


@pytest.mark.parametrize("option", [{"norm_topk_prob": True}, {"moe_layer_freq": 2}, {"topk_method": "noaux_tc"}])
def test_what_deepseek_v2_lacks_a_reference_for_is_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=next(iter(option))):
        ModelConfig.from_dict({"architectures": ["DeepseekV2ForCausalLM"], **option})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen2_moe", "deepseek_v3", "gpt_oss"])
def test_a_sequence_has_the_same_logits_in_every_batch(
    name: str, dtype: torch.dtype, tmp_path: Path, decoder_of: Any, paged_run: Any
) -> None:
    if library() is None:
        pytest.skip("needs the CPU's native kernels")
    tiny(name).save_pretrained(tmp_path)
    model = decoder_of(tmp_path, dtype=dtype)
    rng = random.Random(1)
    prompts = [[rng.randrange(2, _VOCABULARY) for _ in range(length)] for length in (61, 9, 30, 1)]
    together = paged_run(model, prompts, new_tokens=16, dtype=dtype).sequences
    for index, prompt in enumerate(prompts):
        alone = paged_run(model, [prompt], new_tokens=16, seed=index + 1, dtype=dtype).sequences[0]
        assert alone.tokens == together[index].tokens
        assert torch.equal(torch.stack(alone.logits), torch.stack(together[index].logits))
