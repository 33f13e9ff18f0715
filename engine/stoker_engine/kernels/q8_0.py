"""Weights in GGUF's format Q8_0: 32 numbers are one scale and 32 small integers, 8.5 bits a number.

    a row    │ d q q … q │ d q q … q │ …        a block of 34 bytes holds w = d·q for 32 weights:
             └ 34 bytes ─┘                      d a float16, little-endian, then 32 int8

The format is llama.cpp's (``block_q8_0`` of ggml-common.h).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch.nn import functional

#: Weights that share a scale, and the bytes that hold them.
BLOCK: Final = 32
BLOCK_BYTES: Final = 34


def dequantize(blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """uint8 [..., inner / 32 × 34] → [..., inner] in `dtype`: the product d·q, which float32 holds exactly, rounded."""
    parts: torch.Tensor = blocks.unflatten(-1, (-1, BLOCK_BYTES))
    scales = parts[..., :2].contiguous().view(torch.float16)
    integers = parts[..., 2:].contiguous().view(torch.int8)
    return (scales.float() * integers).flatten(-2).to(dtype)


def q8_0_product(
    blocks: torch.Tensor, inner: int, dtype: torch.dtype, bias: torch.Tensor | None = None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """x ↦ x Wᵀ + b: [..., inner] → [..., outputs], all in `dtype`; to the bit what `kernels.linear.product` returns for
    W dequantized to `dtype`. The tensors must stay where they are; their numbers may change.

    Args:
        blocks: W, uint8 [outputs, inner / 32 × 34]. Rows may lie apart; the bytes of one do not.
        inner: a multiple of 32.
        dtype: float32 or bfloat16.
        bias: [outputs] in `dtype`.
    """
    assert blocks.dtype == torch.uint8 and blocks.shape[1] * BLOCK == inner * BLOCK_BYTES
    return lambda x: functional.linear(x, dequantize(blocks, dtype), bias)


def q8_0_rows(blocks: torch.Tensor, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows `ids` [n] (int64) of a table `blocks` (uint8 [rows, inner / 32 × 34]) → [n, inner] in `dtype`."""
    return dequantize(blocks[ids], dtype)
