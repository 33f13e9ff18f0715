"""Binding of rotary.cpp."""

from __future__ import annotations

import ctypes

import torch


def apply_rotary(
    library: ctypes.CDLL, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    """See `kernels.rotary.apply_rotary`."""
    tokens, heads, size = x.shape
    if x.stride(2) != 1:
        x = x.contiguous()
    assert cos.is_contiguous() and sin.is_contiguous() and cos.dtype == sin.dtype == x.dtype
    out = torch.empty(tokens, heads, size, dtype=x.dtype)
    library.stoker_rotary(
        x.dtype == torch.bfloat16,
        interleaved,
        x.data_ptr(),
        x.stride(0),
        x.stride(1),
        cos.data_ptr(),
        sin.data_ptr(),
        out.data_ptr(),
        tokens,
        heads,
        size,
        cos.shape[-1],
    )
    return out


def cos_sin(
    library: ctypes.CDLL, positions: torch.Tensor, frequencies: torch.Tensor, scale: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels.rotary.cos_sin`."""
    tokens, pairs = len(positions), len(frequencies)
    positions, frequencies = positions.contiguous(), frequencies.contiguous()
    assert positions.dtype == torch.int64 and frequencies.dtype == torch.float32
    cos, sin = torch.empty(2, tokens, 1, pairs, dtype=dtype).unbind()
    library.stoker_rope_cos_sin(
        dtype == torch.bfloat16,
        positions.data_ptr(),
        frequencies.data_ptr(),
        scale,
        cos.data_ptr(),
        sin.data_ptr(),
        tokens,
        pairs,
    )
    return cos, sin
