"""Binding of group_blocks.cpp."""

from __future__ import annotations

import ctypes
from typing import Final

import torch

from stoker_engine.architectures.stored_formats import Code, GroupFormat, Scale
from stoker_engine.kernels.cpu.matrix import GROUPS, CpuLinear

#: Weight codes and scale types, in the order of the enums of quant/groups.h.
_CODES: Final[tuple[Code, ...]] = (
    "uint2", "uint3", "uint4", "uint8", "int8", "fp8_e4m3", "fp8_e5m2", "fp4", "nf4",
)  # fmt: skip
_SCALES: Final[tuple[Scale, ...]] = ("float32", "float16", "bfloat16", "e8m0", "fp8_e4m3")


def linear(
    library: ctypes.CDLL,
    blocks: torch.Tensor,
    format: GroupFormat,
    inner: int,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> CpuLinear:
    """Return the linear operation with a matrix uint8 [outputs, row_bytes], which may be strided by rows; bit-identical
    to `kernels.cpu.linear` with the dequantized matrix."""
    _check(blocks, format, inner)
    return CpuLinear.of(library, GROUPS, blocks, inner, dtype, bias, format_args(format, inner))


def dequantize(
    library: ctypes.CDLL, blocks: torch.Tensor, format: GroupFormat, inner: int, dtype: torch.dtype
) -> torch.Tensor:
    """See `kernels.group_blocks.dequantize`; `blocks` [rows, row_bytes] may be strided by rows."""
    _check(blocks, format, inner)
    out = torch.empty((len(blocks), inner), dtype=dtype)
    library.stoker_group_dequantize(
        *format_args(format, inner),
        dtype == torch.bfloat16,
        blocks.data_ptr(),
        blocks.stride(0),
        out.data_ptr(),
        *out.shape,
    )
    return out


def _check(blocks: torch.Tensor, format: GroupFormat, inner: int) -> None:
    assert blocks.dtype == torch.uint8 and blocks.shape[1] == format.row_bytes(inner) and blocks.stride(1) == 1
    assert inner > 0 and format.group % 16 == 0


def format_args(format: GroupFormat, inner: int) -> tuple[int, int, bool, bool, int]:
    """Return the arguments that describe a format to the library's functions."""
    format = format.for_rows(inner)
    code, scale = _CODES.index(format.code), _SCALES.index(format.scale)
    return code, scale, format.zero, format.row_scale, format.group
