"""Binding of gguf_blocks.cpp."""

from __future__ import annotations

import ctypes
from typing import Final

import torch

from stoker_engine.architectures.stored_formats import GGUFFormat
from stoker_engine.kernels.cpu.matrix import GGUF, CpuLinear

#: ggml's type numbers.
TYPES: Final = {
    "F16": 1,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q5_0": 6,
    "Q5_1": 7,
    "Q8_0": 8,
    "Q2_K": 10,
    "Q3_K": 11,
    "Q4_K": 12,
    "Q5_K": 13,
    "Q6_K": 14,
    "IQ4_NL": 20,
    "IQ4_XS": 23,
    "BF16": 30,
    "MXFP4": 39,
}


def linear(
    library: ctypes.CDLL,
    blocks: torch.Tensor,
    format: GGUFFormat,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> CpuLinear:
    """Return the linear operation with a matrix in `blocks` (uint8 [outputs, row bytes], may be strided by rows) for x
    in `dtype`; bit-identical to `kernels.cpu.linear` with the dequantized matrix."""
    return CpuLinear.of(library, GGUF, blocks, _inner(blocks, format), dtype, bias, [TYPES[format.name]])


def dequantize(library: ctypes.CDLL, blocks: torch.Tensor, format: GGUFFormat, dtype: torch.dtype) -> torch.Tensor:
    """See `kernels.gguf_blocks.dequantize`; `blocks` [rows, row bytes] may be strided by rows."""
    assert blocks.stride(1) == 1
    out = torch.empty((len(blocks), _inner(blocks, format)), dtype=dtype)
    is_bf16 = dtype == torch.bfloat16
    library.stoker_gguf_dequantize(
        TYPES[format.name], is_bf16, blocks.data_ptr(), blocks.stride(0), out.data_ptr(), *out.shape
    )
    return out


def _inner(blocks: torch.Tensor, format: GGUFFormat) -> int:
    """Return the number of elements in a row."""
    assert blocks.dtype == torch.uint8 and blocks.shape[1] % format.bytes == 0
    return blocks.shape[1] // format.bytes * format.numbers
