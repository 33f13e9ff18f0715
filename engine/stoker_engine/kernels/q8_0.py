"""Weights in GGUF's format Q8_0: 32 numbers are a scale and 32 small integers, 8.5 bits a number.

    a row    │ d q q … q │ d q q … q │ …        a block of 34 bytes holds w = d·q for 32 weights:
             └ 34 bytes ─┘                      d a float16, little-endian, then 32 times q, an int8

The format is llama.cpp's (``block_q8_0`` in ggml-common.h).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Final

import torch
from torch.nn import functional

from stoker_engine.kernels.native import q8_0 as native
from stoker_engine.kernels.native.library import native_library

#: Weights that share a scale, and the bytes that hold them.
BLOCK: Final = 32
BLOCK_BYTES: Final = 34


def dequantize(blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """uint8 [..., inner / 32 × 34] → [..., inner] in `dtype`: the product d·q, which float32 holds exactly, rounded."""
    inner = _inner(blocks)
    library = _library(blocks, dtype)
    if library is not None:
        return native.dequantize(library, blocks, inner, dtype)
    parts = blocks.reshape(*blocks.shape[:-1], inner // BLOCK, BLOCK_BYTES)
    scales = parts[..., :2].contiguous().view(torch.float16)
    integers = parts[..., 2:].contiguous().view(torch.int8)
    return (scales.float() * integers).flatten(-2).to(dtype)


def q8_0_product(
    blocks: torch.Tensor, inner: int, dtype: torch.dtype, bias: torch.Tensor | None = None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """x ↦ x Wᵀ + b: [..., inner] → [..., outputs], all in `dtype`. Bit for bit what `kernels.linear.product` gives for
    W dequantized to `dtype`, so that a row's result is the same in every batch. The tensors must stay where they are;
    their numbers may change.

    Args:
        blocks: W, uint8 [outputs, inner / 32 × 34]. Rows may lie apart; the bytes of one do not.
        inner: a multiple of 32.
        dtype: float32 or bfloat16.
        bias: [outputs] in `dtype`.
    """
    assert blocks.dim() == 2 and _inner(blocks) == inner
    library = _library(blocks, dtype)
    if library is None:
        return lambda x: functional.linear(x, dequantize(blocks, dtype), bias)
    return native.product(library, blocks, inner, dtype, bias)


def q8_0_rows(blocks: torch.Tensor, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows `ids` [n] (int64) of a table `blocks` (uint8 [rows, inner / 32 × 34]) → [n, inner] in `dtype`.

    Raises:
        IndexError: a row that the table does not have.
    """
    return dequantize(blocks.index_select(0, ids), dtype)


def _inner(blocks: torch.Tensor) -> int:
    """Numbers in a row."""
    assert blocks.dtype == torch.uint8 and blocks.shape[-1] % BLOCK_BYTES == 0
    return blocks.shape[-1] // BLOCK_BYTES * BLOCK


def _library(blocks: torch.Tensor, dtype: torch.dtype) -> ctypes.CDLL | None:
    return native_library(blocks.device, dtype)
