"""A matrix as compressed-tensors stores it, its numbers rounded to the nearest that its scale offers.

Scales span from the least to the largest number of a group; they are rounded to the weights' dtype, or float32, before
codes are chosen. Formulas and layout are compressed-tensors' own: github.com/vllm-project/compressed-tensors
"""

from __future__ import annotations

from typing import Final

import torch
from torch.nn import functional

from stoker_engine.export.schemes import Scheme

#: The largest number of OCP's e4m3.
_LARGEST_FP8: Final = 448.0


def quantized(weights: torch.Tensor, scheme: Scheme) -> dict[str, torch.Tensor]:
    """The tensors that a module has instead of its matrix `weights` [outputs, inner], by the ends of their names.

    Args:
        weights: of any floating dtype, all of them finite; `scheme.group_size` divides `inner`.
    """
    outputs, inner = weights.shape
    dtype = torch.float32 if weights.dtype == torch.float64 else weights.dtype
    grouped = weights.float().view(outputs, -1, scheme.group_size or inner)
    least, largest = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    if scheme.type == "float":
        scales = _scales(torch.maximum(-least, largest) / _LARGEST_FP8, dtype)
        codes = (grouped / scales.float().unsqueeze(-1)).clamp(-_LARGEST_FP8, _LARGEST_FP8)
        return {"weight": codes.view(outputs, inner).to(torch.float8_e4m3fn), "weight_scale": scales}
    steps = 2**scheme.bits - 1
    low = -(2 ** (scheme.bits - 1))
    zeros = None
    if scheme.symmetric:
        scales = _scales(torch.maximum(-least, largest) / (steps / 2), dtype)
    else:
        scales = _scales((largest - least) / steps, dtype)
        zeros = (low - least / scales.float()).round().clamp(low, low + steps)
    codes = grouped / scales.float().unsqueeze(-1)
    if zeros is not None:
        codes += zeros.unsqueeze(-1)
    stored = codes.round_().clamp_(low, low + steps).view(outputs, inner).to(torch.int8)
    if scheme.format == "int-quantized":
        return {"weight": stored, "weight_scale": scales}
    tensors = {
        "weight_packed": _packed(stored, scheme.bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor([outputs, inner]),
    }
    if zeros is not None:
        tensors["weight_zero_point"] = _packed(zeros.to(torch.int8).T, scheme.bits).T.contiguous()
    return tensors


def _scales(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As stored; of a group of zeros, or of what the dtype has for 0, something to divide by."""
    scales = exact.to(dtype)
    return torch.where(scales == 0, torch.finfo(dtype).eps, scales)


def _packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """int8 [rows, n] of 4 or 8 `bits` → int32 [rows, ⌈n × bits / 32⌉]: made unsigned, from the low bits up."""
    each = 32 // bits
    padded = functional.pad(codes.int() + 2 ** (bits - 1), (0, -codes.shape[1] % each))
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=codes.device)
    return torch.sum(padded.unflatten(1, (-1, each)) << shifts, -1, dtype=torch.int32)
