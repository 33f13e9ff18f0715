"""Dequantization of pieces (`block_tile`) of matrices in groups (`kernels/group_blocks.py` has the layout)."""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from stoker_engine.architectures.stored_formats import Code, Scale
from stoker_engine.kernels.triton.common.float8 import decode

#: Indices of the types of codes and of scales in kernels.
CODES: Final[dict[Code, int]] = {
    "uint2": 0, "uint3": 1, "uint4": 2, "uint8": 3, "int8": 4, "fp8_e4m3": 5, "fp8_e5m2": 6, "fp4": 7, "nf4": 8,
}  # fmt: skip
SCALES: Final[dict[Scale, int]] = {"float32": 0, "float16": 1, "bfloat16": 2, "e8m0": 3, "fp8_e4m3": 4}


@triton.jit
def group_values(rows, first, PIECE: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return float32 [outputs, runs, run], see `block_tile.tile_values`."""
    SHARED: tl.constexpr = TILE.span // TILE.pieces
    BYTES: tl.constexpr = 12 if TILE.code == 1 else SHARED  # per span
    UNITS: tl.constexpr = (TILE.inner + 31) // 32
    GROUPS: tl.constexpr = (TILE.inner + TILE.group - 1) // TILE.group
    HEADER: tl.constexpr = 4 if TILE.row_scale else 0
    WIDTH: tl.constexpr = 4 if TILE.scale == 0 else 2 if TILE.scale <= 2 else 1
    ZEROS: tl.constexpr = HEADER + GROUPS * WIDTH
    PACKED: tl.constexpr = ZEROS + (GROUPS if TILE.zero else 0)

    run = tl.arange(0, TILE.runs)[None, :, None] * TILE.run
    at = run + tl.arange(0, TILE.run)[None, None, :]
    unit, lane = first // 32 + at // SHARED, at % SHARED
    codes = tl.load(rows + PACKED + unit * BYTES + lane, mask=unit < UNITS, other=0)
    if TILE.pieces > 1:
        codes = (codes >> (PIECE * 8 // TILE.pieces)) & ((1 << (8 // TILE.pieces)) - 1)
    if TILE.code == 1:
        high = tl.load(rows + PACKED + unit * BYTES + SHARED + PIECE, mask=unit < UNITS, other=0)
        codes |= ((high >> lane) & 1) << 2

    column = first + run // SHARED * 32 + PIECE * SHARED + run % SHARED
    group = column // TILE.group
    has = group < GROUPS
    scale = _scale(rows + HEADER + group * WIDTH, has, TILE.scale)
    if TILE.row_scale:
        scale = _scale(rows, has, 0) * scale
    if TILE.zero:
        zero = tl.load(rows + ZEROS + group, mask=has, other=0).to(tl.float32)
        return scale * (code_values(codes, TILE.code) - zero)
    elif TILE.implied_zero:
        return scale * (code_values(codes, TILE.code) - TILE.implied_zero)
    else:
        return scale * code_values(codes, TILE.code)


@triton.jit
def _scale(pointers, mask, SCALE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load scales as float32, byte by byte since rows are not aligned."""
    low = tl.load(pointers, mask=mask, other=0)
    if SCALE == 3:
        # 2^-127 is subnormal; 255 is NaN.
        bits = tl.where(low == 0, 0x00400000, tl.where(low == 255, 0x7FC00000, low.to(tl.int32) << 23))
        return bits.to(tl.float32, bitcast=True)
    elif SCALE == 4:
        return decode(low, 1, tl.float32)
    else:
        half = low.to(tl.uint16) | (tl.load(pointers + 1, mask=mask, other=0).to(tl.uint16) << 8)
        if SCALE == 1:
            return half.to(tl.float16, bitcast=True).to(tl.float32)
        elif SCALE == 2:
            return (half.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
        else:
            upper = tl.load(pointers + 2, mask=mask, other=0).to(tl.uint32)
            upper |= tl.load(pointers + 3, mask=mask, other=0).to(tl.uint32) << 8
            return (half.to(tl.uint32) | (upper << 16)).to(tl.float32, bitcast=True)


@triton.jit
def code_values(codes, CODE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the values of codes (uint8) before a zero point is subtracted, float32."""
    if CODE <= 3:
        return codes.to(tl.float32)
    elif CODE == 4:
        return codes.to(tl.int8, bitcast=True).to(tl.float32)
    elif CODE <= 6:
        return decode(codes, CODE - 4, tl.float32)
    elif CODE == 7:
        # Move the bits to their places in float16, whose exponent bias is 15 instead of 1.
        bits = ((codes & 8).to(tl.uint16) << 12) | ((codes & 7).to(tl.uint16) << 9)
        return bits.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
    else:
        return _nf4(codes)


@triton.jit
def _nf4(codes):  # type: ignore[no-untyped-def]
    negative = _one_of_four(codes, -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453)
    near = _one_of_four(codes, -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0)
    small = _one_of_four(codes, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224)
    large = _one_of_four(codes, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)
    lower, upper = tl.where((codes & 4) == 0, negative, near), tl.where((codes & 4) == 0, small, large)
    return tl.where((codes & 8) == 0, lower, upper)


@triton.jit
def _one_of_four(codes, first, second, third, fourth):  # type: ignore[no-untyped-def]
    """Select a value by the two lowest bits of a code."""
    even, second_bit = (codes & 1) == 0, (codes & 2) == 0
    return tl.where(second_bit, tl.where(even, first, second), tl.where(even, third, fourth)).to(tl.float32)
