"""Linear operations and row lookup with matrices in blocks."""

from __future__ import annotations

import ctypes

import torch

from stoker_engine.architectures.stored_formats import GGUFFormat, StoredFormat
from stoker_engine.kernels.cpu import gguf_blocks, group_blocks
from stoker_engine.kernels.cpu.matrix import CpuLinear


def linear(
    library: ctypes.CDLL,
    blocks: torch.Tensor,
    stored: StoredFormat,
    inner: int,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> CpuLinear:
    """See `kernels.blocks.block_linear`. `blocks` may be strided by rows."""
    if isinstance(stored, GGUFFormat):
        return gguf_blocks.linear(library, blocks, stored, dtype, bias)
    return group_blocks.linear(library, blocks, stored, inner, dtype, bias)


def rows(
    library: ctypes.CDLL, blocks: torch.Tensor, stored: StoredFormat, inner: int, ids: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """See `kernels.blocks.block_rows`."""
    if isinstance(stored, GGUFFormat):
        return gguf_blocks.dequantize(library, blocks.index_select(0, ids), stored, dtype)
    return group_blocks.dequantize(library, blocks.index_select(0, ids), stored, inner, dtype)
