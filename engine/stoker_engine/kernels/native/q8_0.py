"""Calls q8_0.cpp."""

from __future__ import annotations

import ctypes

import torch

from stoker_engine.kernels.bundle import Operation
from stoker_engine.kernels.native.linear import product_by
from stoker_engine.kernels.q8_0 import BLOCK, BLOCK_BYTES


def product(
    library: ctypes.CDLL, blocks: torch.Tensor, dtype: torch.dtype, bias: torch.Tensor | None = None
) -> Operation:
    """See `kernels.q8_0.q8_0_linear`. Rows of `blocks` may lie apart."""
    return product_by(library.stoker_q8_0_product, blocks, _inner(blocks), dtype, bias)


def dequantize(library: ctypes.CDLL, blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """See `kernels.q8_0.dequantize`; `blocks` [rows, inner / 32 × 34], whose rows may lie apart."""
    assert blocks.stride(1) == 1
    out = torch.empty((len(blocks), _inner(blocks)), dtype=dtype)
    library.stoker_q8_0_dequantize(
        dtype == torch.bfloat16, blocks.data_ptr(), blocks.stride(0), out.data_ptr(), *out.shape
    )
    return out


def rows(library: ctypes.CDLL, blocks: torch.Tensor, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """See `kernels.q8_0.q8_0_rows`."""
    return dequantize(library, blocks.index_select(0, ids), dtype)


def _inner(blocks: torch.Tensor) -> int:
    """Numbers in a row."""
    assert blocks.dtype == torch.uint8 and blocks.shape[1] % BLOCK_BYTES == 0
    return blocks.shape[1] // BLOCK_BYTES * BLOCK
