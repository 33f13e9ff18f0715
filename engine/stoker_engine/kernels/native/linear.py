"""Calls linear.cpp."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch


def product(
    library: ctypes.CDLL, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """See `kernels.linear.linear`."""
    outputs, inner = weight.shape
    dtype, is_bf16, function = weight.dtype, weight.dtype == torch.bfloat16, library.stoker_linear
    assert weight.stride(1) == 1
    assert bias is None or (bias.dtype == dtype and bias.is_contiguous())
    pointer, stride, bias_pointer = weight.data_ptr(), weight.stride(0), None if bias is None else bias.data_ptr()

    # The tensors are kept with their addresses.
    def multiply(x: torch.Tensor, _: object = (weight, bias)) -> torch.Tensor:
        if x.dim() != 2 or x.stride(1) != 1:
            return multiply(x.reshape(-1, inner).contiguous()).view(*x.shape[:-1], outputs)
        rows, width = x.shape
        assert width == inner and x.dtype == dtype
        out = torch.empty((rows, outputs), dtype=dtype)
        function(
            is_bf16,
            x.data_ptr(),
            x.stride(0),
            pointer,
            stride,
            bias_pointer,
            out.data_ptr(),
            rows,
            outputs,
            inner,
        )
        return out

    return multiply
