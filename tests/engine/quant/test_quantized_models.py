"""Whole models: a quantized checkpoint has bitwise the outputs of its dequantized values in float32."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load_file, save_file

from stoker_engine.architectures.stored_formats import GroupFormat
from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.kernels import select
from stoker_engine.models.checkpoint import find_checkpoint

from .quantized_pairs import CASES, PROMPTS, Pair, answers_of, assert_close


@pytest.mark.parametrize(("family", "method"), CASES)
def test_quantized_models_answer_as_dequantized(family: str, method: str, pair_of: Callable[[str, str], Pair]) -> None:
    pair = pair_of(family, method)
    answers, expected = answers_of(pair.quantized), answers_of(pair.dequantized)
    # Another order changes sums; and the library divides scales where Stoker multiplies.
    if "order" in method or "NVFP4" in method:
        assert_close(answers, expected)
    else:
        assert answers == expected


@pytest.mark.parametrize(
    "method", ["W4A16 asymmetric", "FP8 tensors", "W4A16 in order of groups", "embedding and head"]
)
def test_answers_without_cpu_kernels_are_close(
    method: str, pair_of: Callable[[str, str], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(select, "cpu_library", lambda device, dtype: None)
    pair = pair_of("llama", method)
    assert_close(answers_of(pair.quantized), answers_of(pair.dequantized))


@pytest.mark.parametrize(
    ("family", "method"),
    [
        *(("llama", method) for method in ("W4A16", "W3A16", "FP8 rows", "FP8 blocks")),
        *(("phi3", "W4A16"), ("mixtral", "FP8 blocks")),
    ],
)
def test_answers_equal_those_of_transformers(
    family: str, method: str, pair_of: Callable[[str, str], Pair], assert_greedy: Callable[..., None]
) -> None:
    """transformers loads the quantized checkpoint itself."""
    pair = pair_of(family, method)
    for prompt, (tokens, _) in zip(PROMPTS, answers_of(pair.quantized), strict=True):
        assert_greedy(pair.quantized, prompt, tokens)


@pytest.mark.parametrize(
    ("family", "method"),
    [("llama", "MXFP4"), ("llama", "FP8 tensors"), ("qwen2", "W8A8"), ("deepseek_v3", "FP8 blocks")],
)
def test_answers_equal_those_of_transformers_on_dequantized_weights(
    family: str, method: str, pair_of: Callable[[str, str], Pair], assert_greedy: Callable[..., None]
) -> None:
    """In these cases transformers quantizes activations, computes in bfloat16, or does not support partial blocks."""
    pair = pair_of(family, method)
    for prompt, (tokens, _) in zip(PROMPTS, answers_of(pair.quantized), strict=True):
        assert_greedy(pair.dequantized, prompt, tokens)


def _stacks(tensors: dict[str, torch.Tensor], scale: str) -> dict[str, torch.Tensor]:
    """Return Mixtral's tensors with its experts in transformers' stacks, if they are in blocks of whole rows.

    Args:
        scale: end of the names of scales.
    """
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in (0, 1):
        for part, joined in (("weight", ""), (scale, f"_{scale.removeprefix('weight_')}")):
            stem = f"model.layers.{layer}.block_sparse_moe.experts"
            one, two, three = (
                torch.stack([tensors[f"{stem}.{expert}.w{index}.{part}"].view(torch.uint8) for expert in range(4)])
                for index in (1, 2, 3)
            )
            dtype = tensors[f"{stem}.0.w1.{part}"].dtype
            found[f"model.layers.{layer}.mlp.experts.gate_up_proj{joined}"] = torch.cat([one, three], 1).view(dtype)
            found[f"model.layers.{layer}.mlp.experts.down_proj{joined}"] = two.view(dtype)
    return found


def test_stacked_experts_answer_as_dequantized(pair_of: Callable[[str, str], Pair]) -> None:
    pair = pair_of("mixtral", "FP8 blocks")
    weights = pair.quantized / "model.safetensors"
    stacked = _stacks(load_file(weights), "weight_scale_inv")
    assert stacked["model.layers.1.mlp.experts.gate_up_proj"].shape == (4, 192, 64)
    assert stacked["model.layers.1.mlp.experts.gate_up_proj_scale_inv"].shape == (4, 6, 4)
    save_file(stacked, weights)
    assert answers_of(pair.quantized) == answers_of(pair.dequantized)


def test_stacked_experts_in_mxfp4_answer_as_dequantized(pair_of: Callable[[str, str], Pair]) -> None:
    """gpt-oss' storage, in a family whose other matrices are unquantized."""
    pair = pair_of("mixtral", "MXFP4")
    weights, config = pair.quantized / "model.safetensors", pair.quantized / "config.json"
    dequantized, stacked = load_file(pair.dequantized / "model.safetensors"), dict[str, torch.Tensor]()
    packed = {name.replace("weight_packed", "weight"): tensor for name, tensor in load_file(weights).items()}
    for name, tensor in _stacks(packed, "weight_scale").items():
        if name.endswith(("_proj", "_proj_scale")) and "experts" in name:
            blocks = name.removesuffix("_scale") + ("_scales" if name.endswith("_scale") else "_blocks")
            stacked[blocks] = tensor if name.endswith("_scale") else tensor.unflatten(-1, (-1, 16))
        elif name in dequantized:
            stacked[name] = dequantized[name]
    save_file({name: tensor.contiguous() for name, tensor in stacked.items()}, weights)
    stated = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": stated}))
    formats = find_checkpoint(EngineArgs(str(pair.quantized))).weight_formats(torch.float32, torch.device("cpu"))
    assert formats.stored("layers.0.experts.3.up.weight") == GroupFormat("fp4", 32, "e8m0")
    assert formats.stored("layers.0.q.weight") is None
    assert answers_of(pair.quantized) == answers_of(pair.dequantized)
