"""RMS normalisation (`kernels/rms_norm.py` defines it), also with a quantized result (`kernels/w8a8_linear.py`). One
program computes a row."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from stoker_engine.kernels.bundle import QuantizedRows, RowFormat
from stoker_engine.kernels.triton.common.arithmetic import rounded, widened
from stoker_engine.kernels.triton.common.gpu_target import GpuTarget
from stoker_engine.kernels.triton.common.kernel_variant import KernelVariant
from stoker_engine.kernels.triton.common.operation import operation
from stoker_engine.kernels.triton.common.quantized_rows import constants_of, empty_rows, store_quantized
from stoker_engine.kernels.triton.common.rows import rows_of, warps_for


@triton.jit
def _rms_norm(  # type: ignore[no-untyped-def]
    x,
    added,
    weight,
    total,
    out,
    scales,
    eps,
    x_outer: tl.int64,
    x_inner: tl.int64,
    INNER: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    ADDS: tl.constexpr,
    CODE: tl.constexpr,
    GROUP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, PADDED)
    is_number = dims < SIZE
    DTYPE: tl.constexpr = x.dtype.element_ty
    numbers = widened(tl.load(x + row // INNER * x_outer + row % INNER * x_inner + dims, mask=is_number, other=0.0))
    if ADDS:
        summed = rounded(numbers + widened(tl.load(added + row * SIZE + dims, mask=is_number, other=0.0)), DTYPE)
        tl.store(total + row * SIZE + dims, summed, mask=is_number)
        numbers = widened(summed)
    weights = widened(tl.load(weight + dims, mask=is_number, other=0.0))
    normalised = numbers * tl.rsqrt(tl.sum(numbers * numbers, 0) / SIZE + eps)
    if weight.dtype.element_ty != tl.float32:
        normalised = widened(rounded(normalised, DTYPE))
    result = rounded(normalised * weights, DTYPE)
    if CODE:
        store_quantized(widened(result), dims, row, out, scales, SIZE, CODE, GROUP)
    else:
        tl.store(out + row * SIZE + dims, result, mask=is_number)


@operation("stoker::rms_norm")
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `kernels.rms_norm.rms_norm`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, None, out, eps)
    return out


@rms_norm.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@operation("stoker::add_rms_norm")
def add_rms_norm(
    x: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels.rms_norm.after_sum`."""
    total, out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _launch(x, added.contiguous(), weight, total, out, eps)
    return total, out


@add_rms_norm.register_fake
def _(x: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), torch.empty(x.shape, dtype=x.dtype, device=x.device)


@operation("stoker::rms_norm_rows")
def _rms_norm_rows(x: torch.Tensor, weight: torch.Tensor, eps: float, format: str) -> tuple[torch.Tensor, torch.Tensor]:
    rows = empty_rows(len(x), x.shape[1], x.device, RowFormat[format])
    _launch(x, None, weight, None, rows, eps, RowFormat[format])
    return rows.values, rows.scales


@_rms_norm_rows.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, eps: float, format: str) -> tuple[torch.Tensor, torch.Tensor]:
    rows = empty_rows(len(x), x.shape[1], x.device, RowFormat[format])
    return rows.values, rows.scales


@operation("stoker::add_rms_norm_rows")
def _add_rms_norm_rows(
    x: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, eps: float, format: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = empty_rows(len(x), x.shape[1], x.device, RowFormat[format])
    _launch(x, added.contiguous(), weight, total, rows, eps, RowFormat[format])
    return total, rows.values, rows.scales


@_add_rms_norm_rows.register_fake
def _(
    x: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, eps: float, format: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = empty_rows(len(x), x.shape[1], x.device, RowFormat[format])
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), rows.values, rows.scales


def rms_norm_rows(x: torch.Tensor, weight: torch.Tensor, eps: float, format: RowFormat) -> QuantizedRows:
    """See `QuantizingKernels.rms_norm`."""
    return QuantizedRows(*_rms_norm_rows(x, weight, eps, format.name))


def add_rms_norm_rows(
    x: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, eps: float, format: RowFormat
) -> tuple[torch.Tensor, QuantizedRows]:
    """See `QuantizingKernels.add_rms_norm`."""
    total, values, scales = _add_rms_norm_rows(x, added, weight, eps, format.name)
    return total, QuantizedRows(values, scales)


def _launch(
    x: torch.Tensor,
    added: torch.Tensor | None,
    weight: torch.Tensor,
    total: torch.Tensor | None,
    out: torch.Tensor | QuantizedRows,
    eps: float,
    format: RowFormat | None = None,
) -> None:
    rows = rows_of(x)
    outer, inner, size = rows.shape
    values, scales = (out.values.view(torch.uint8), out.scales) if isinstance(out, QuantizedRows) else (out, None)
    if not values.numel():
        return
    code, group = (0, 0) if format is None else constants_of(format)
    padded = _padded(size, group)
    _rms_norm[(outer * inner,)](
        rows,
        added,
        weight,
        total,
        values,
        scales,
        eps,
        *rows.stride()[:2],
        INNER=inner,
        SIZE=size,
        PADDED=padded,
        ADDS=added is not None,
        CODE=code,
        GROUP=group,
        num_warps=warps_for(padded),
    )


def _padded(size: int, group: int) -> int:
    """Return the number of elements of a tile for rows of `size` elements: whole groups."""
    padded: int = max(triton.next_power_of_2(size), group)
    return padded


def kernel_variants(gpu: GpuTarget) -> Iterator[KernelVariant]:
    """See `attention.decode.kernel_variants`."""
    for name, inner, size, weight, adds, format in (
        ("hidden", 1, 8192, "bf16", False, None),
        ("heads", 32, 128, "bf16", False, None),
        ("wide", 1, 640, "fp32", False, None),
        ("after a sum", 1, 8192, "bf16", True, None),
        ("quantized", 1, 8192, "bf16", False, RowFormat.FP8_ROWS),
        ("quantized after a sum", 1, 8192, "bf16", True, RowFormat.FP8_ROWS),
        ("quantized in groups after a sum", 1, 7168, "bf16", True, RowFormat.FP8_GROUPS),
        ("quantized to int8 after a sum", 1, 8192, "bf16", True, RowFormat.INT8_ROWS),
    ):
        code, group = (0, 0) if format is None else constants_of(format)
        padded = _padded(size, group)
        pointers = {"x": "bf16", "weight": weight, "out": "u8" if format else "bf16"}
        constants: dict[str, object] = {"INNER": inner, "SIZE": size, "PADDED": padded, "ADDS": adds}
        constants |= {"CODE": code, "GROUP": group}
        if adds:
            pointers |= {"added": "bf16", "total": "bf16"}
        else:
            constants |= {"added": None, "total": None}
        if format:
            pointers["scales"] = "fp32"
        else:
            constants["scales"] = None
        yield KernelVariant.of(f"rms_norm {name}", _rms_norm, pointers, {"eps": "fp32"}, constants, warps_for(padded))
