"""Calls q8_0.cpp."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch


def product(
    library: ctypes.CDLL, blocks: torch.Tensor, inner: int, dtype: torch.dtype, bias: torch.Tensor | None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """See `kernels.q8_0.q8_0_product`."""
    outputs = len(blocks)
    is_bf16, function = dtype == torch.bfloat16, library.stoker_q8_0_product
    assert blocks.stride(1) == 1
    assert bias is None or (bias.dtype == dtype and bias.is_contiguous())
    pointer, stride, bias_pointer = blocks.data_ptr(), blocks.stride(0), None if bias is None else bias.data_ptr()

    # The tensors are kept with their addresses.
    def multiply(x: torch.Tensor, _: object = (blocks, bias)) -> torch.Tensor:
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


def dequantize(library: ctypes.CDLL, blocks: torch.Tensor, inner: int, dtype: torch.dtype) -> torch.Tensor:
    """See `kernels.q8_0.dequantize`."""
    if blocks.dim() != 2 or blocks.stride(1) != 1:
        rows = blocks.reshape(-1, blocks.shape[-1]).contiguous()
        return dequantize(library, rows, inner, dtype).view(*blocks.shape[:-1], inner)
    out = torch.empty((len(blocks), inner), dtype=dtype)
    library.stoker_q8_0_dequantize(
        dtype == torch.bfloat16, blocks.data_ptr(), blocks.stride(0), out.data_ptr(), len(blocks), inner
    )
    return out
