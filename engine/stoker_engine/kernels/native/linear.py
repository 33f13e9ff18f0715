"""Calls linear.cpp, and what else multiplies by a matrix."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from stoker_engine.kernels.bundle import Operation


def product(library: ctypes.CDLL, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Operation:
    """See `kernels.linear.linear`."""
    return product_by(library.stoker_linear, weight, weight.shape[1], weight.dtype, bias)


def product_by(
    function: Callable[..., Any], stored: torch.Tensor, inner: int, dtype: torch.dtype, bias: torch.Tensor | None
) -> Operation:
    """The product with a matrix [outputs, inner], which `stored` holds in the way that `function` reads.

    Args:
        function: takes what ``stoker_linear`` takes.
        stored: [outputs, …], whose rows may lie apart.
        dtype: of x and the result.
    """
    outputs, is_bf16 = len(stored), dtype == torch.bfloat16
    assert stored.stride(1) == 1
    assert bias is None or (bias.dtype == dtype and bias.is_contiguous())
    pointer, stride, bias_pointer = stored.data_ptr(), stored.stride(0), None if bias is None else bias.data_ptr()

    # The tensors are kept with their addresses.
    def multiply(x: torch.Tensor, _: object = (stored, bias)) -> torch.Tensor:
        if x.dim() != 2 or (x.stride(1) != 1 and inner > 1):
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
