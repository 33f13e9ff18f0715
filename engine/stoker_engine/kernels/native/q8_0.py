"""Q8_0's blocks by gguf_blocks.cpp."""

from __future__ import annotations

import ctypes

import torch

from stoker_engine.architectures.stored_formats import Q8_0
from stoker_engine.kernels.bundle import Operation
from stoker_engine.kernels.native import gguf_blocks


def product(
    library: ctypes.CDLL, blocks: torch.Tensor, dtype: torch.dtype, bias: torch.Tensor | None = None
) -> Operation:
    """See `kernels.q8_0.q8_0_linear`. Rows of `blocks` may lie apart."""
    return gguf_blocks.product(library, blocks, Q8_0, dtype, bias)


def dequantize(library: ctypes.CDLL, blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """See `kernels.q8_0.dequantize`; `blocks` [rows, inner / 32 × 34], whose rows may lie apart."""
    return gguf_blocks.dequantize(library, blocks, Q8_0, dtype)


def rows(library: ctypes.CDLL, blocks: torch.Tensor, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """See `kernels.q8_0.q8_0_rows`."""
    return dequantize(library, blocks.index_select(0, ids), dtype)
