"""Products with matrices in blocks, by the CPU's kernels."""

from __future__ import annotations

import ctypes

import torch

from stoker_engine.architectures.stored_formats import Q8_0, StoredFormat
from stoker_engine.kernels import blocks as reference
from stoker_engine.kernels.bundle import Operation
from stoker_engine.kernels.native import q8_0
from stoker_engine.kernels.native.linear import product as plain_product


def product(
    library: ctypes.CDLL,
    blocks: torch.Tensor,
    stored: StoredFormat,
    inner: int,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> Operation:
    """See `kernels.blocks.block_linear`. Rows of `blocks` may lie apart."""
    if stored == Q8_0:
        return q8_0.product(library, blocks, dtype, bias)
    return lambda x: plain_product(library, reference.dequantize(blocks, stored, inner, dtype), bias)(x)


def rows(
    library: ctypes.CDLL, blocks: torch.Tensor, stored: StoredFormat, inner: int, ids: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """See `kernels.blocks.block_rows`."""
    if stored == Q8_0:
        return q8_0.rows(library, blocks, ids, dtype)
    return reference.block_rows(blocks, stored, inner, ids, dtype)
