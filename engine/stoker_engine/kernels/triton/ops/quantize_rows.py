"""Quantization of rows, alone or after an activation (`kernels/w8a8_linear.py` defines it). One program computes a row,
so its bits do not depend on the batch.

The activation's result is rounded to the dtype of x first, as if it were stored: the bits are those of two operations.
Values are encoded by integer operations, on every GPU alike. Rows longer than a tile are read and activated twice if
they have a single scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import torch
import triton
import triton.language as tl

from stoker_engine.architectures.activation import Activation
from stoker_engine.kernels import activation as defined
from stoker_engine.kernels.bundle import QuantizedRows, RowFormat
from stoker_engine.kernels.triton.common.float8 import magnitude_bits
from stoker_engine.kernels.triton.common.gpu_target import GpuTarget
from stoker_engine.kernels.triton.common.kernel_variant import KernelVariant
from stoker_engine.kernels.triton.common.operation import operation
from stoker_engine.kernels.triton.common.quantized_rows import (
    constants_of,
    empty_rows,
    encode_scaled,
    row_scale,
    store_quantized,
)
from stoker_engine.kernels.triton.common.rows import warps_for
from stoker_engine.kernels.triton.ops.activation import IDENTITY, activated_part
from stoker_engine.kernels.triton.ops.activation import constants_of as activation_constants

#: Largest number of elements of a tile.
_LARGEST: Final = 16384


@triton.jit
def _quantize_rows(  # type: ignore[no-untyped-def]
    x,
    values,
    scales,
    limit,
    alpha,
    x_row: tl.int64,
    SIZE: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    PART: tl.constexpr,
    CODE: tl.constexpr,
    GROUP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    from_row = x + row * x_row
    at = tl.arange(0, PART)
    if SIZE <= PART:
        result = activated_part(from_row, at, limit, alpha, SIZE, KIND, GATED)
        store_quantized(result, at, row, values, scales, SIZE, CODE, GROUP)
    elif GROUP:
        for first in tl.range(0, SIZE, PART):
            result = activated_part(from_row, first + at, limit, alpha, SIZE, KIND, GATED)
            store_quantized(result, first + at, row, values, scales, SIZE, CODE, GROUP)
    else:
        largest = tl.zeros([PART], tl.int32)
        for first in tl.range(0, SIZE, PART):
            result = activated_part(from_row, first + at, limit, alpha, SIZE, KIND, GATED)
            largest = tl.maximum(largest, magnitude_bits(result))
        scale = row_scale(tl.max(largest, 0), CODE)
        tl.store(scales + row, scale)
        to_row = values + row * SIZE
        for first in tl.range(0, SIZE, PART):
            result = activated_part(from_row, first + at, limit, alpha, SIZE, KIND, GATED)
            tl.store(to_row + first + at, encode_scaled(result, scale, CODE), mask=first + at < SIZE)


@operation("stoker::quantize_rows")
def _run(
    x: torch.Tensor, kind: int, gated: bool, limit: float, alpha: float, format: str
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = x if x.dim() == 2 and x.stride(1) == 1 else x.contiguous().view(-1, x.shape[-1])
    size = rows.shape[1] // 2 if gated else rows.shape[1]
    values, scales = empty_rows(len(rows), size, x.device, RowFormat[format])
    if values.numel():
        code, group = constants_of(RowFormat[format])
        part = _part(size, group)
        _quantize_rows[(len(rows),)](
            rows,
            values.view(torch.uint8),
            scales,
            limit,
            alpha,
            rows.stride(0),
            SIZE=size,
            KIND=kind,
            GATED=gated,
            PART=part,
            CODE=code,
            GROUP=group,
            num_warps=warps_for(part),
        )
    return values, scales


@_run.register_fake
def _(
    x: torch.Tensor, kind: int, gated: bool, limit: float, alpha: float, format: str
) -> tuple[torch.Tensor, torch.Tensor]:
    size = x.shape[-1] // 2 if gated else x.shape[-1]
    rows = empty_rows(x.numel() // x.shape[-1], size, x.device, RowFormat[format])
    return rows.values, rows.scales


def _part(size: int, group: int) -> int:
    """Return the number of elements of a tile for rows of `size` elements: whole groups."""
    part: int = max(min(triton.next_power_of_2(size), _LARGEST), group)
    return part


def quantize_rows(x: torch.Tensor, format: RowFormat) -> QuantizedRows:
    """See `kernels.w8a8_linear.quantize_rows`."""
    return QuantizedRows(*_run(x, IDENTITY, False, 0.0, 0.0, format.name))


def act_and_mul_rows(act: Activation, format: RowFormat) -> Callable[[torch.Tensor], QuantizedRows]:
    """See `QuantizingKernels.act_and_mul`."""
    kind, limit, alpha = activation_constants(act)
    return lambda x: QuantizedRows(*_run(x, kind, True, limit, alpha, format.name))


def activation_rows(act: Activation, format: RowFormat) -> Callable[[torch.Tensor], QuantizedRows]:
    """See `QuantizingKernels.activation`."""
    defined.activation(act)
    kind, limit, alpha = activation_constants(act)
    return lambda x: QuantizedRows(*_run(x, kind, False, limit, alpha, format.name))


def kernel_variants(gpu: GpuTarget) -> Iterator[KernelVariant]:
    """See `attention.decode.kernel_variants`."""
    silu = activation_constants("silu")[0]
    for name, size, kind, gated, format in (
        ("4096", 4096, IDENTITY, False, RowFormat.FP8_ROWS),
        ("8192", 8192, IDENTITY, False, RowFormat.FP8_ROWS),
        ("14336 after silu", 14336, silu, True, RowFormat.FP8_ROWS),
        ("28672 after silu", 28672, silu, True, RowFormat.FP8_ROWS),
        ("16384 in groups", 16384, IDENTITY, False, RowFormat.FP8_GROUPS),
        ("18432 after silu in groups", 18432, silu, True, RowFormat.FP8_GROUPS),
        ("14336 after silu to int8", 14336, silu, True, RowFormat.INT8_ROWS),
    ):
        code, group = constants_of(format)
        part = _part(size, group)
        yield KernelVariant.of(
            f"quantize_rows {name}",
            _quantize_rows,
            {"x": "bf16", "values": "u8", "scales": "fp32"},
            {"limit": "fp32", "alpha": "fp32"},
            {"SIZE": size, "KIND": kind, "GATED": gated, "PART": part, "CODE": code, "GROUP": group},
            warps_for(part),
        )
