"""Families with remote code only, and the hub's files: an equivalent model's weights, renamed.

Qwen 1 and InternLM differ from a Llama with biases only in how files name and fuse the same tensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from ...support.engine.tiny_configs import OWN_HEADS, VOCABULARY
from ...support.engine.tiny_models import randomized, reference_of

Tensors = dict[str, torch.Tensor]

_SIZES: dict[str, Any] = {**OWN_HEADS, "vocab_size": VOCABULARY, "rms_norm_eps": 1e-6}


def _llama(**options: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    return randomized(LlamaForCausalLM(LlamaConfig(**{**_SIZES, "bos_token_id": 0, "eos_token_id": 1, **options})))


def _save(folder: Path, tensors: Tensors, config: dict[str, Any]) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def _layers(tensors: Tensors, rename: Callable[[str, Tensors], Tensors], top: dict[str, str]) -> Tensors:
    renamed = {top[name]: tensor for name, tensor in tensors.items() if name in top}
    for index in range(_SIZES["num_hidden_layers"]):
        prefix = f"model.layers.{index}."
        layer = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        renamed |= rename(str(index), layer)
    return renamed


def _qwen1(theirs: PreTrainedModel) -> tuple[Tensors, dict[str, Any]]:
    def rename(index: str, layer: Tensors) -> Tensors:
        h = f"transformer.h.{index}."
        qkv = {kind: [layer[f"self_attn.{part}_proj.{kind}"] for part in "qkv"] for kind in ("weight", "bias")}
        return {
            h + "ln_1.weight": layer["input_layernorm.weight"],
            h + "ln_2.weight": layer["post_attention_layernorm.weight"],
            h + "attn.c_attn.weight": torch.cat(qkv["weight"]),
            h + "attn.c_attn.bias": torch.cat(qkv["bias"]),
            h + "attn.c_proj.weight": layer["self_attn.o_proj.weight"],
            h + "mlp.w1.weight": layer["mlp.up_proj.weight"],  # Qwen's w2 has the activation
            h + "mlp.w2.weight": layer["mlp.gate_proj.weight"],
            h + "mlp.c_proj.weight": layer["mlp.down_proj.weight"],
        }

    top = {
        "model.embed_tokens.weight": "transformer.wte.weight",
        "model.norm.weight": "transformer.ln_f.weight",
        "lm_head.weight": "lm_head.weight",
    }
    config = {
        "architectures": ["QWenLMHeadModel"],
        "hidden_size": 48,
        "intermediate_size": 160,  # of w1 and w2 together
        "kv_channels": 12,
        "layer_norm_epsilon": 1e-6,
        "max_position_embeddings": 8192,
        "no_bias": True,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "rotary_emb_base": 10000,
        "rotary_pct": 1.0,
        "seq_length": 256,
        "use_dynamic_ntk": True,
        "use_logn_attn": True,
        "vocab_size": 128,
    }
    return _layers(theirs.state_dict(), rename, top), config


def _internlm2(theirs: PreTrainedModel) -> tuple[Tensors, dict[str, Any]]:
    def rename(index: str, layer: Tensors) -> Tensors:
        at = f"model.layers.{index}."
        query, key, value = (layer[f"self_attn.{part}_proj.weight"].view(2, -1, 12, 48) for part in "qkv")
        return {
            at + "attention_norm.weight": layer["input_layernorm.weight"],
            at + "ffn_norm.weight": layer["post_attention_layernorm.weight"],
            at + "attention.wqkv.weight": torch.cat((query, key, value), dim=1).flatten(0, 2),
            at + "attention.wo.weight": layer["self_attn.o_proj.weight"],
            at + "feed_forward.w1.weight": layer["mlp.gate_proj.weight"],
            at + "feed_forward.w2.weight": layer["mlp.down_proj.weight"],
            at + "feed_forward.w3.weight": layer["mlp.up_proj.weight"],
        }

    top = {
        "model.embed_tokens.weight": "model.tok_embeddings.weight",
        "model.norm.weight": "model.norm.weight",
        "lm_head.weight": "output.weight",
    }
    config = {
        **_SIZES,
        "architectures": ["InternLM2ForCausalLM"],
        "bias": False,
        "num_key_value_heads": 2,
        "rope_scaling": {"type": "dynamic", "factor": 2.0},
        "rope_theta": 10000,
        "torch_dtype": "float32",
    }
    return _layers(theirs.state_dict(), rename, top), config


def _internlm3(theirs: PreTrainedModel) -> tuple[Tensors, dict[str, Any]]:
    config = {
        **_SIZES,
        "architectures": ["InternLM3ForCausalLM"],
        "bias": False,
        "qkv_bias": False,
        "head_dim": 16,
        "num_key_value_heads": 2,
        "rope_scaling": {"rope_type": "dynamic", "factor": 6.0},
    }
    return theirs.state_dict(), config


def _qwen_like() -> PreTrainedModel:
    theirs = _llama(attention_bias=True)
    for layer in theirs.model.layers:
        layer.self_attn.o_proj.bias.data.zero_()  # Qwen has none
    return theirs


def _yi(theirs: PreTrainedModel) -> tuple[Tensors, dict[str, Any]]:
    old = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.zeros(6) for i in range(2)}
    config = {**_SIZES, "architectures": ["LLaMAForCausalLM"], "num_key_value_heads": 2, "rope_theta": 10000.0}
    return theirs.state_dict() | old, config


REMOTE: dict[str, tuple[Callable[[], PreTrainedModel], Callable[[PreTrainedModel], tuple[Tensors, dict[str, Any]]]]] = {
    "Qwen 1": (_qwen_like, _qwen1),
    "InternLM 2": (lambda: _llama(num_key_value_heads=2), _internlm2),
    "InternLM 3": (lambda: _llama(num_key_value_heads=2, head_dim=16), _internlm3),
    "an old Llama": (lambda: _llama(num_key_value_heads=2), _yi),
}


PROMPTS = [[5, 6, 7, 8, 9] * 7, [11, 12, 13]]


@pytest.mark.parametrize("name", REMOTE)
def test_renamed_weights_equal_the_equivalent_model(
    name: str, tmp_path: Path, decoder_of: Any, paged_run: Any, assert_run: Any
) -> None:
    make, rename = REMOTE[name]
    theirs = make()
    _save(tmp_path, *rename(theirs))
    assert_run(paged_run(decoder_of(tmp_path), PROMPTS, new_tokens=64), reference_of(theirs))


@pytest.mark.parametrize(
    ("make", "prefix"),
    [
        (lambda: GPT2LMHeadModel(GPT2Config(vocab_size=128, n_embd=48, n_layer=2, n_head=4)), "transformer."),
        (lambda: BloomForCausalLM(BloomConfig(vocab_size=128, hidden_size=48, n_layer=2, n_head=4)), "transformer."),
    ],
)
def test_files_without_the_models_prefix_are_read(
    make: Any, prefix: str, tmp_path: Path, decoder_of: Any, paged_run: Any, assert_run: Any
) -> None:
    """Like the first GPT-2 and BLOOM files, with masks beside the weights."""
    torch.manual_seed(0)
    theirs = randomized(make())
    theirs.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {name.removeprefix(prefix): tensor for name, tensor in load_file(file).items()}
    masks = {f"h.{i}.attn.bias": torch.ones(1, 1, 8, 8) for i in range(2)} if "wte.weight" in tensors else {}
    save_file(tensors | masks, file, metadata={"format": "pt"})
    assert_run(paged_run(decoder_of(tmp_path), PROMPTS, new_tokens=16), reference_of(theirs))


def test_falcon_is_read_by_its_former_name(tmp_path: Path, decoder_of: Any, paged_run: Any, assert_run: Any) -> None:
    torch.manual_seed(0)
    options = {"vocab_size": 128, "hidden_size": 48, "multi_query": True, "bias": False, "parallel_attn": True}
    theirs = randomized(FalconForCausalLM(FalconConfig(**options, num_hidden_layers=2, num_attention_heads=4)))
    theirs.save_pretrained(tmp_path)
    old = {"architectures": ["RWForCausalLM"], **options, "n_layer": 2, "n_head": 4, "alibi": False}
    (tmp_path / "config.json").write_text(json.dumps(old))
    assert_run(paged_run(decoder_of(tmp_path), PROMPTS, new_tokens=16), reference_of(theirs))


def test_gemma_3_with_a_vision_tower_is_read(tmp_path: Path, decoder_of: Any, paged_run: Any, assert_run: Any) -> None:
    """A multimodal checkpoint as written by transformers: only the text decoder is used."""
    torch.manual_seed(0)
    text = {
        **{key: value for key, value in _SIZES.items() if key != "vocab_size"},
        "vocab_size": 160,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 16,
        "num_hidden_layers": 7,
    }
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=150, boi_token_index=151
    )
    theirs = randomized(Gemma3ForConditionalGeneration._from_config(config, attn_implementation="eager"))
    theirs.save_pretrained(tmp_path)
    ours = decoder_of(tmp_path)
    assert ours.config.eos_token_ids == (1,)
    assert_run(paged_run(ours, PROMPTS, new_tokens=32), reference_of(theirs))
