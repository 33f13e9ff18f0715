"""Weights of whole quantized models: bytes, ranks' shards, and refused cases."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import load_file, save_file

from stoker_common.errors import ModelError, WeightsError
from stoker_engine.kernels.blocks import dequantize
from stoker_engine.parallel.communicator import SingleRank

from .quantized_pairs import CASES, Pair, load_decoder


@pytest.mark.parametrize(("family", "method"), CASES)
def test_weights_take_the_bytes_of_the_files(family: str, method: str, pair_of: Callable[[str, str], Pair]) -> None:
    pair = pair_of(family, method)
    model, planned = load_decoder(pair.quantized)
    assert sum(target.tensor.nbytes for target in model.weight_targets().values()) == planned
    if family == "deepseek_v3":
        return  # its kv_b_proj is computed unquantized
    matrices = [
        (target.tensor, target.stored, target.inner)
        for target in model.weight_targets().values()
        if target.stored is not None
    ]
    held = sum(blocks.nbytes for blocks, _, _ in matrices)
    if "asymmetric" in method:
        # Zero points of 4 bits are bytes here: half of what a scale takes.
        assert held == pair.codes + pair.scales + pair.scales // 2
    elif method in ("FP8 blocks", "FP8 large blocks", "FP8 tensors", "FP8 in one block"):
        # Each row has its own copy of scales that rows share in the file.
        groups = sum(blocks.shape[0] * stored.groups(inner) for blocks, stored, inner in matrices)
        assert held == pair.codes + 4 * groups
    elif "NVFP4" in method:
        # Each row has its tensor's own scale.
        rows = sum(blocks.shape[0] for blocks, _, _ in matrices)
        assert held == pair.codes + pair.scales + 4 * rows
    else:
        assert held == pair.codes + pair.scales


@dataclass
class _Rank(SingleRank):
    """One of several ranks that never communicate."""

    rank: int = 0
    size: int = 2


@pytest.mark.parametrize(
    ("family", "method"),
    [
        *((family, method) for family in ("llama wide", "phi3") for method in ("W4A16 asymmetric", "MXFP4")),
        *((family, method) for family in ("mixtral", "deepseek_v3") for method in ("FP8 rows", "FP8 blocks")),
    ],
)
def test_ranks_hold_their_shards(family: str, method: str, pair_of: Callable[[str, str], Pair]) -> None:
    pair = pair_of(family, method)
    whole = load_decoder(pair.dequantized)[0].weight_targets()
    for rank in (0, 1):
        shares = load_decoder(pair.quantized, _Rank(rank))[0].weight_targets()
        matrices = {name: target for name, target in shares.items() if target.stored is not None}
        assert any(target.shard is not None for target in matrices.values())
        for name, target in matrices.items():
            assert target.stored is not None
            found = dequantize(target.tensor, target.stored, target.inner, torch.float32)
            assert torch.equal(found, target.part_of(whole[name].tensor)), name


@pytest.mark.parametrize(
    ("family", "method", "ranks", "message"),
    [
        ("llama", "FP8 large blocks", 2, "blocks of 48 columns"),
        ("llama wide", "W4A16 in order of groups", 2, "act order"),
        ("deepseek_v3", "FP8 blocks", 4, "multiples of 16"),
    ],
)
def test_unshardable_weights_are_refused(
    family: str, method: str, ranks: int, message: str, pair_of: Callable[[str, str], Pair]
) -> None:
    with pytest.raises(ModelError, match=message):
        load_decoder(pair_of(family, method).quantized, _Rank(1, ranks))


@pytest.mark.parametrize(
    ("method", "damage", "message"),
    [
        ("FP8 tensors", {"weight_scale": torch.tensor(float("nan"))}, "nan or infinity"),
        ("FP8 tensors", {"weight": torch.full((64, 64), 0x7F, dtype=torch.uint8)}, "nan or infinity"),
        ("FP8 blocks", {"weight_scale_inv": torch.full((2, 4), float("inf"))}, "nan or infinity"),
        ("W4A16", {"weight_scale": torch.full((64, 2), float("inf"), dtype=torch.bfloat16)}, "nan or infinity"),
        ("W4A16", {"weight_scale": None}, "no weight_scale"),
        ("W4A16", {"weight_scale": torch.ones(64, 3)}, "has shape"),
        ("W4A16", {"weight_packed": torch.zeros(32, 8, dtype=torch.int32)}, "weight_shape"),
        ("W4A16", {"weight_packed": None}, "no weight"),
        ("MXFP4", {"weight_scale": torch.full((64, 2), 255, dtype=torch.uint8)}, "nan or infinity"),
    ],
)
def test_damaged_checkpoints_are_refused_with_a_short_message(
    method: str,
    damage: dict[str, torch.Tensor | None],
    message: str,
    pair_of: Callable[[str, str], Pair],
) -> None:
    folder = pair_of("llama", method).quantized
    tensors = load_file(folder / "model.safetensors")
    for part, tensor in damage.items():
        name = f"model.layers.1.self_attn.q_proj.{part}"
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor.view(tensors[name].dtype)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=message) as error:
        load_decoder(folder)
    assert "q_proj" in str(error.value) and len(str(error.value)) < 400


def test_unsupported_scheme_is_refused(pair_of: Callable[[str, str], Pair]) -> None:
    folder = pair_of("llama", "W4A16").quantized
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["format"] = "marlin-24"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="marlin-24"):
        load_decoder(folder)
