"""Matrices quantized as in checkpoints, by the methods of the tests of whole models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from stoker_engine.architectures.stored_formats import LARGEST_GROUP

from .compressed import Compressed, with_columns_shuffled

#: A matrix's tensors by the ends of their names, its values in float32, and the ``quantization_config``.
Quantized = tuple[dict[str, torch.Tensor], torch.Tensor, dict[str, Any]]


def _compressed(**case: Any) -> Callable[[torch.Tensor], Quantized]:
    def quantized(weight: torch.Tensor) -> Quantized:
        made = Compressed(weight=weight, **case)
        stated = made.stated(ignore=["lm_head", "re:.*\\.gate$"], quantization_status="compressed")
        return made.tensors, made.decompressed(), stated

    return quantized


def _in_order_of_groups(weight: torch.Tensor) -> Quantized:
    made = Compressed(_W4, weight=weight)
    tensors, order = with_columns_shuffled(made, 32)
    values = torch.empty_like(weight)
    values[:, order] = made.decompressed()
    stated = made.stated()
    stated["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    return tensors, values, stated


def _everything(weight: torch.Tensor) -> Quantized:
    tensors, values, stated = _compressed(weights=_W4)(weight)
    stated["config_groups"]["group_0"]["targets"] = ["Linear", "Embedding"]
    return tensors, values, stated | {"ignore": []}


def _fp8(high: int, wide: int) -> Callable[[torch.Tensor], Quantized]:
    """Return a method with blocks like DeepSeek's, of another size."""

    def quantized(weight: torch.Tensor) -> Quantized:
        made = Compressed(
            {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [high, wide]},
            format="float-quantized",
            scale_dtype=torch.float32,
            weight=weight,
        )
        tensors = {"weight": made.tensors["weight"], "weight_scale_inv": made.tensors["weight_scale"]}
        stated = {"quant_method": "fp8", "weight_block_size": [high, wide], "activation_scheme": "dynamic"}
        return tensors, made.decompressed(), stated

    return quantized


def _fp8_by_tensor(weight: torch.Tensor) -> Quantized:
    scale = weight.abs().amax() / 448
    values = (weight / scale).to(torch.float8_e4m3fn)
    stated = {"quant_method": "fp8", "activation_scheme": "static"}
    tensors = {"weight": values, "weight_scale": scale, "input_scale": torch.tensor(0.01)}
    return tensors, values.float() * scale, stated


def _fp8_in_one_block(weight: torch.Tensor) -> Quantized:
    """Quantize in one block that is larger than any matrix."""
    tensors, values, _ = _fp8_by_tensor(weight)
    stated = {"quant_method": "fp8", "weight_block_size": [LARGEST_GROUP, LARGEST_GROUP]}
    return {"weight": tensors["weight"], "weight_scale_inv": tensors["weight_scale"].view(1, 1)}, values, stated


def _nvfp4_of_modelopt(weight: torch.Tensor) -> Quantized:
    made = Compressed(_NVFP4, format="nvfp4-pack-quantized", weight=weight)
    tensors = {
        "weight": made.tensors["weight_packed"],
        "weight_scale": made.tensors["weight_scale"],
        "weight_scale_2": made.tensors["weight_global_scale"].reciprocal(),
    }
    stated = {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}
    return tensors, made.decompressed(), stated


_W4 = {"num_bits": 4, "group_size": 32}
_FP8_ROWS = {"num_bits": 8, "type": "float", "strategy": "channel"}
_MXFP4 = {"num_bits": 4, "type": "float", "group_size": 32, "scale_dtype": torch.uint8, "zp_dtype": torch.uint8}
_NVFP4 = {
    "num_bits": 4,
    "type": "float",
    "strategy": "tensor_group",
    "group_size": 16,
    "scale_dtype": torch.float8_e4m3fn,
    "zp_dtype": torch.float8_e4m3fn,
}

METHODS: dict[str, Callable[[torch.Tensor], Quantized]] = {
    "W4A16": _compressed(weights=_W4),
    "W4A16 asymmetric": _compressed(weights={**_W4, "symmetric": False}),
    "W3A16": _compressed(weights={**_W4, "num_bits": 3}),
    "W8A8": _compressed(
        weights={"num_bits": 8, "strategy": "channel"},
        inputs={"num_bits": 8, "strategy": "token", "dynamic": True},
        format="int-quantized",
    ),
    "FP8 rows": _compressed(weights=_FP8_ROWS, format="float-quantized"),
    "MXFP4": _compressed(weights=_MXFP4, format="mxfp4-pack-quantized"),
    "NVFP4": _compressed(weights=_NVFP4, format="nvfp4-pack-quantized"),
    "NVFP4 of modelopt": _nvfp4_of_modelopt,
    "FP8 blocks": _fp8(32, 16),
    "FP8 large blocks": _fp8(64, 48),
    "FP8 blocks of 128": _fp8(128, 128),
    "FP8 tensors": _fp8_by_tensor,
    "FP8 in one block": _fp8_in_one_block,
    "W4A16 in order of groups": _in_order_of_groups,
    "embedding and head": _everything,
}


def quantize_each(method: Callable[[torch.Tensor], Quantized], weight: torch.Tensor) -> Quantized:
    """Quantize a matrix, or each matrix of a stack."""
    if weight.dim() == 2:
        return method(weight)
    made = [method(matrix) for matrix in weight]
    parts = {end: torch.stack([tensors[end] for tensors, _, _ in made]) for end in made[0][0]}
    return parts, torch.stack([values for _, values, _ in made]), made[0][2]
