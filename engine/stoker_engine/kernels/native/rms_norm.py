"""Calls rms_norm.cpp."""

from __future__ import annotations

import ctypes

import torch


def rms_norm(library: ctypes.CDLL, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `kernels.rms_norm.rms_norm`; `x` [tokens, d] or [tokens, heads, d] may be a slice of wider rows."""
    shape, size = x.shape, x.shape[-1]
    if x.dim() not in (2, 3) or x.stride(-1) != 1 or (x.dim() == 3 and x.stride(1) != size):
        x = x.reshape(-1, size).contiguous()
    out = torch.empty(shape, dtype=x.dtype)
    library.stoker_rms_norm(
        x.dtype == torch.bfloat16,
        weight.dtype == torch.float32 != x.dtype,
        x.data_ptr(),
        x.stride(0),
        x.shape[1] if x.dim() == 3 else 1,
        weight.data_ptr(),
        eps,
        out.data_ptr(),
        x.shape[0],
        size,
    )
    return out
