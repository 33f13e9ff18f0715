"""Binding of argmax.cpp."""

from __future__ import annotations

import ctypes

import torch


def argmax(library: ctypes.CDLL, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels.argmax.argmax`."""
    if x.stride(1) != 1:
        x = x.contiguous()
    rows, size = x.shape
    is_bf16 = x.dtype == torch.bfloat16
    assert is_bf16 or x.dtype == torch.float32
    out, largest = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
    library.stoker_argmax(is_bf16, x.data_ptr(), x.stride(0), out.data_ptr(), largest.data_ptr(), rows, size)
    return out, largest
