"""Quantization of rows to e4m3, alone or after an activation (`kernels/fp8_linear.py` defines it). One program computes
a row, so its bits do not depend on the batch.

The activation's result is rounded to the dtype of x first, as if it were stored: the bits are those of two operations.
Values are encoded by integer operations, on every GPU alike; rows longer than a tile are read and activated twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import torch
import triton
import triton.language as tl

from stoker_engine.architectures.activation import Activation
from stoker_engine.kernels import activation as defined
from stoker_engine.kernels.bundle import QuantizedRows
from stoker_engine.kernels.triton.common.float8 import encode_scaled, magnitude_bits, row_scale
from stoker_engine.kernels.triton.common.gpu_target import GpuTarget
from stoker_engine.kernels.triton.common.kernel_variant import KernelVariant
from stoker_engine.kernels.triton.common.operation import operation
from stoker_engine.kernels.triton.common.rows import empty_rows, warps_for
from stoker_engine.kernels.triton.ops.activation import IDENTITY, activated_part, constants_of

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
):
    row = tl.program_id(0).to(tl.int64)
    from_row, to_row = x + row * x_row, values + row * SIZE
    at = tl.arange(0, PART)
    if SIZE <= PART:
        result = activated_part(from_row, at, limit, alpha, SIZE, KIND, GATED)
        scale = row_scale(tl.max(magnitude_bits(result), 0))
        tl.store(to_row + at, encode_scaled(result, scale), mask=at < SIZE)
    else:
        largest = tl.zeros([PART], tl.int32)
        for first in tl.range(0, SIZE, PART):
            result = activated_part(from_row, first + at, limit, alpha, SIZE, KIND, GATED)
            largest = tl.maximum(largest, magnitude_bits(result))
        scale = row_scale(tl.max(largest, 0))
        for first in tl.range(0, SIZE, PART):
            result = activated_part(from_row, first + at, limit, alpha, SIZE, KIND, GATED)
            tl.store(to_row + first + at, encode_scaled(result, scale), mask=first + at < SIZE)
    tl.store(scales + row, scale)


@operation("stoker::quantize_rows")
def _run(x: torch.Tensor, kind: int, gated: bool, limit: float, alpha: float) -> tuple[torch.Tensor, torch.Tensor]:
    rows = x if x.dim() == 2 and x.stride(1) == 1 else x.contiguous().view(-1, x.shape[-1])
    size = rows.shape[1] // 2 if gated else rows.shape[1]
    values, scales = empty_rows(len(rows), size, x.device)
    if values.numel():
        part = _part(size)
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
            num_warps=warps_for(part),
        )
    return values, scales


@_run.register_fake
def _(x: torch.Tensor, kind: int, gated: bool, limit: float, alpha: float) -> tuple[torch.Tensor, torch.Tensor]:
    size = x.shape[-1] // 2 if gated else x.shape[-1]
    return empty_rows(x.numel() // x.shape[-1], size, x.device)


def _part(size: int) -> int:
    part: int = min(triton.next_power_of_2(size), _LARGEST)
    return part


def quantize_rows(x: torch.Tensor) -> QuantizedRows:
    """See `kernels.fp8_linear.quantize_rows`."""
    return QuantizedRows(*_run(x, IDENTITY, False, 0.0, 0.0))


def act_and_mul_rows(act: Activation) -> Callable[[torch.Tensor], QuantizedRows]:
    """See `Fp8Kernels.act_and_mul`."""
    kind, limit, alpha = constants_of(act)
    return lambda x: QuantizedRows(*_run(x, kind, True, limit, alpha))


def activation_rows(act: Activation) -> Callable[[torch.Tensor], QuantizedRows]:
    """See `Fp8Kernels.activation`."""
    defined.activation(act)
    kind, limit, alpha = constants_of(act)
    return lambda x: QuantizedRows(*_run(x, kind, False, limit, alpha))


def kernel_variants(gpu: GpuTarget) -> Iterator[KernelVariant]:
    """See `attention.kernel_variants`."""
    silu = constants_of("silu")[0]
    for name, size, kind, gated in (
        ("4096", 4096, IDENTITY, False),
        ("8192", 8192, IDENTITY, False),
        ("14336 after silu", 14336, silu, True),
        ("28672 after silu", 28672, silu, True),
    ):
        part = _part(size)
        yield KernelVariant.of(
            f"quantize_rows {name}",
            _quantize_rows,
            {"x": "bf16", "values": "u8", "scales": "fp32"},
            {"limit": "fp32", "alpha": "fp32"},
            {"SIZE": size, "KIND": kind, "GATED": gated, "PART": part},
            warps_for(part),
        )
