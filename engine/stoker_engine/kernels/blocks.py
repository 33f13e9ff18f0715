"""Dequantization of matrices stored in blocks (`architectures.stored_formats`), and linear operations with them."""

from __future__ import annotations

import torch

from stoker_engine.architectures.stored_formats import GGUFFormat, StoredFormat
from stoker_engine.kernels import gguf_blocks, group_blocks
from stoker_engine.kernels.linear import linear


def dequantize(blocks: torch.Tensor, stored: StoredFormat, inner: int, dtype: torch.dtype) -> torch.Tensor:
    """Dequantize uint8 [..., bytes of a row] → [..., inner] in `dtype`, rounded from float32."""
    if isinstance(stored, GGUFFormat):
        return gguf_blocks.dequantize(blocks, stored, dtype)
    return group_blocks.dequantize(blocks, stored, inner, dtype)


def block_linear(
    x: torch.Tensor, blocks: torch.Tensor, stored: StoredFormat, inner: int, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return x Wᵀ + b: [..., inner] → [..., outputs], for W in `blocks` (uint8 [outputs, bytes of a row]) and `bias`
    [outputs] in x's dtype: `linear` with W dequantized to that dtype. For W not packed into panels, the CPU
    kernels' results are bit-identical to those of their `linear` with the dequantized W.
    """
    return linear(x, dequantize(blocks, stored, inner, x.dtype), bias)


def block_rows(
    blocks: torch.Tensor, stored: StoredFormat, inner: int, ids: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Look up rows `ids` [n] (int64) of a table `blocks` (uint8 [rows, bytes of a row]) → [n, inner] in `dtype`.

    Raises:
        IndexError: an id is out of range (on a CPU).
    """
    return dequantize(blocks.index_select(0, ids), stored, inner, dtype)


def all_finite(blocks: torch.Tensor, stored: StoredFormat, inner: int) -> bool:
    """Whether all elements of `blocks` (uint8 [..., bytes of a row]) are certainly finite, also in bfloat16."""
    if isinstance(stored, GGUFFormat):
        return gguf_blocks.all_finite(blocks, stored)
    return group_blocks.is_finite(blocks, stored, inner)
