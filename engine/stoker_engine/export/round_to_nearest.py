"""Round-to-nearest quantization of a matrix into compressed-tensors' layout.

With zero points, the range of a group's codes spans the group's smallest and largest element, and 0; in symmetric
schemes and FP8, it spans minus and plus the largest absolute value. Scales are rounded to the weights' dtype
(float32 for float64) before codes are chosen. Formulas and layout: github.com/vllm-project/compressed-tensors
"""

from __future__ import annotations

from typing import Final

import torch
from torch.nn import functional

from stoker_engine.export.schemes import Scheme

#: Largest finite value of OCP's e4m3.
_LARGEST_FP8: Final = 448.0


def quantized(weights: torch.Tensor, scheme: Scheme) -> dict[str, torch.Tensor]:
    """Quantize the matrix `weights` [outputs, inner]. Return its module's tensors, by the last part of their names.

    Args:
        weights: finite elements of any floating dtype; `scheme.group_size` divides `inner`.
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
    """Round scales to `dtype`; scales of 0, including underflows, become eps, so that they can be divided by."""
    scales = exact.to(dtype)
    return torch.where(scales == 0, torch.finfo(dtype).eps, scales)


def _packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack int8 [rows, n] of 4 or 8 `bits` → int32 [rows, ⌈n × bits / 32⌉], as unsigned codes from the low bits up."""
    each = 32 // bits
    padded = functional.pad(codes.int() + 2 ** (bits - 1), (0, -codes.shape[1] % each))
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=codes.device)
    return torch.sum(padded.unflatten(1, (-1, each)) << shifts, -1, dtype=torch.int32)
