"""Calls linear.cpp."""

from __future__ import annotations

import ctypes

import torch


def linear(library: ctypes.CDLL, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """See `kernels.linear.linear`."""
    outputs, inner = weight.shape
    assert x.shape[-1] == inner and x.dtype == weight.dtype and weight.stride(1) == 1
    assert bias is None or (bias.dtype == x.dtype and bias.is_contiguous())
    flat = x if x.dim() == 2 else x.reshape(-1, inner)
    if flat.stride(1) != 1:
        flat = flat.contiguous()
    out = torch.empty(flat.shape[0], outputs, dtype=x.dtype)
    library.stoker_linear(
        x.dtype == torch.bfloat16,
        flat.data_ptr(),
        flat.stride(0),
        weight.data_ptr(),
        weight.stride(0),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        flat.shape[0],
        outputs,
        inner,
    )
    return out if x.dim() == 2 else out.view(*x.shape[:-1], outputs)
