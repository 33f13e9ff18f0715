"""Linear operations with unpacked weights."""

from __future__ import annotations

import ctypes

import torch

from stoker_engine.kernels.cpu.matrix import ROWS, CpuLinear


def linear(library: ctypes.CDLL, weight: torch.Tensor, bias: torch.Tensor | None = None) -> CpuLinear:
    """See `kernels.linear.linear`."""
    return CpuLinear.of(library, ROWS, weight, weight.shape[1], weight.dtype, bias)
