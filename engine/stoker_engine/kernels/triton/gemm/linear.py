"""Linear operations by torch operators, with fewer kernel launches on a GPU than the reference."""

from __future__ import annotations

import torch

from stoker_engine.kernels.bundle import Operation
from stoker_engine.kernels.reference import REFERENCE


def float32_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Operation:
    """See `Kernels.float32_linear`. Products of 16-bit elements are exact in float32, so inputs are not converted
    first."""
    reference = REFERENCE.float32_linear(weight, bias)

    def multiply(x: torch.Tensor) -> torch.Tensor:
        if not x.is_cuda:  # in the interpreter
            return reference(x)
        if bias is None:
            return torch.mm(x, weight.t(), out_dtype=torch.float32)
        return torch.addmm(bias.float(), x, weight.t(), out_dtype=torch.float32)

    return multiply


def batched_linear(weight: torch.Tensor) -> Operation:
    """See `Kernels.batched_linear`. Unlike the reference's, the result is contiguous."""

    def multiply(x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(len(x), len(weight), weight.shape[1])
        torch.bmm(x.transpose(0, 1), weight.transpose(1, 2), out=out.transpose(0, 1))
        return out

    return multiply
