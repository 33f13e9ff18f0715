"""Weights in GGUF's format Q8_0: 32 numbers are a scale and 32 small integers, 8.5 bits a number.

    a row    │ d q q … q │ d q q … q │ …        a block of 34 bytes holds w = d·q for 32 weights:
             └ 34 bytes ─┘                      d a float16, little-endian, then 32 times q, an int8

The format is llama.cpp's (``block_q8_0`` in ggml-common.h).
"""

from __future__ import annotations

from typing import Final

import torch

from stoker_engine.architectures.stored_formats import Q8_0
from stoker_engine.kernels.linear import linear

#: Weights that share a scale, and the bytes that hold them.
BLOCK: Final = Q8_0.numbers
BLOCK_BYTES: Final = Q8_0.bytes


def dequantize(blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """uint8 [..., inner / 32 × 34] → [..., inner] in `dtype`: the product d·q, which float32 holds exactly, rounded."""
    parts = blocks.reshape(*blocks.shape[:-1], blocks.shape[-1] // BLOCK_BYTES, BLOCK_BYTES)
    scales = parts[..., :2].contiguous().view(torch.float16)
    integers = parts[..., 2:].contiguous().view(torch.int8)
    return (scales.float() * integers).flatten(-2).to(dtype)


def q8_0_linear(x: torch.Tensor, blocks: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x Wᵀ + b: [..., inner] → [..., outputs], for W in `blocks` (uint8 [outputs, inner / 32 × 34]) and `bias`
    [outputs] in x's dtype: `linear` with W dequantized to that dtype. With the CPU's kernels bit for bit so.
    """
    return linear(x, dequantize(blocks, x.dtype), bias)


def q8_0_rows(blocks: torch.Tensor, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows `ids` [n] (int64) of a table `blocks` (uint8 [rows, inner / 32 × 34]) → [n, inner] in `dtype`.

    Raises:
        IndexError: a row that the table does not have.
    """
    return dequantize(blocks.index_select(0, ids), dtype)
