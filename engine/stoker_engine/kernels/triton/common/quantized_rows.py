"""Quantization of rows (`kernels/w8a8_linear.py` defines it) within kernels, and the memory of its results."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stoker_engine.kernels.bundle import QuantizedRows, RowFormat
from stoker_engine.kernels.triton.common.float8 import code_of, encode, magnitude_bits


@triton.jit
def store_quantized(x, at, row, values, scales, SIZE: tl.constexpr, CODE: tl.constexpr, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Quantize a whole row, or whole groups of it, and store values and scales.

    Args:
        x: float32 [n], 0 beyond the row's end.
        at: int32 [n], their positions in the row, consecutive; with groups from a multiple of GROUP on.
        row: index of the row.
        values, scales: memory of `QuantizedRows`, its values as bytes.
        SIZE: elements of a row.
        CODE: see `float8.code_of`.
        GROUP: number of columns that share a scale, a power of two; 0: all.
    """
    if GROUP == 0:
        scale = row_scale(tl.max(magnitude_bits(x), 0), CODE)
        tl.store(scales + row, scale)
        encoded = encode_scaled(x, scale, CODE)
    else:
        GROUPS: tl.constexpr = (SIZE + GROUP - 1) // GROUP
        grouped = x.reshape(x.shape[0] // GROUP, GROUP)
        scale = row_scale(tl.max(magnitude_bits(grouped), 1), CODE)
        group = tl.min(at, 0) // GROUP + tl.arange(0, x.shape[0] // GROUP)
        tl.store(scales + row * GROUPS + group, scale, mask=group < GROUPS)
        encoded = encode_scaled(grouped, scale[:, None], CODE).reshape(x.shape[0])
    tl.store(values + row * SIZE + at, encoded, mask=at < SIZE)


@triton.jit
def row_scale(largest, CODE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the scales of rows or groups, float32.

    Args:
        largest: int32, the largest `magnitude_bits` of each.
    """
    LARGEST: tl.constexpr = 127.0 if CODE == 3 else 448.0
    scale = tl.div_rn(largest.to(tl.float32, bitcast=True), LARGEST).to(tl.int32, bitcast=True)
    return tl.maximum(scale, 0x0D800000).to(tl.float32, bitcast=True)  # at least 2⁻¹⁰⁰


@triton.jit
def encode_scaled(x, scale, CODE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Encode float32 values, divided by their scale; NaN becomes NaN in e4m3, and 0 in int8."""
    LARGEST: tl.constexpr = 127.0 if CODE == 3 else 448.0
    scaled = x * tl.div_rn(1.0, scale)
    return encode(tl.where(scaled > LARGEST, LARGEST, tl.where(scaled < -LARGEST, -LARGEST, scaled)), CODE)


def empty_rows(rows: int, size: int, device: torch.device, format: RowFormat) -> QuantizedRows:
    """Return unwritten rows of `size` elements."""
    values = torch.empty((rows, size), dtype=format.dtype, device=device)
    scales = torch.empty((rows, format.groups(size)), dtype=torch.float32, device=device)
    return QuantizedRows(values, scales)


def constants_of(format: RowFormat) -> tuple[int, int]:
    """Return the kernels' CODE and GROUP."""
    return code_of(format.dtype), format.group
