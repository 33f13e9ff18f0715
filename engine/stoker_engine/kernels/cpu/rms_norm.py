"""Binding of rms_norm.cpp."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch


def rms_norm(library: ctypes.CDLL, weight: torch.Tensor, eps: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """See `kernels.rms_norm.rms_norm`; x [tokens, d] or [tokens, heads, d] may be a slice of wider rows."""
    function, size, pointer = library.stoker_rms_norm, len(weight), weight.data_ptr()
    is_wide = weight.dtype == torch.float32
    assert weight.is_contiguous()

    # The default argument keeps the weight alive, since the call uses only its address.
    def normalise(x: torch.Tensor, _: object = weight) -> torch.Tensor:
        shape, dtype = x.shape, x.dtype
        assert shape[-1] == size
        if x.dim() not in (2, 3) or x.stride(-1) != 1 or (x.dim() == 3 and x.stride(1) != size):
            x = x.reshape(-1, size).contiguous()
        out = torch.empty(shape, dtype=dtype)
        function(
            dtype == torch.bfloat16,
            is_wide and dtype != torch.float32,
            x.data_ptr(),
            x.stride(0),
            x.shape[1] if x.dim() == 3 else 1,
            pointer,
            eps,
            out.data_ptr(),
            x.shape[0],
            size,
        )
        return out

    return normalise
