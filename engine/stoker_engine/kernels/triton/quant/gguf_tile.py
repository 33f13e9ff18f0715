"""Dequantization of pieces (`block_tile`) of matrices in GGUF's types (`kernels/gguf_blocks.py` has the layouts)."""

from __future__ import annotations

from typing import Final, NamedTuple

import triton
import triton.language as tl

from stoker_engine.kernels.triton.quant.group_tile import code_values


class Type(NamedTuple):
    """Layout of a type's codes.

    Attributes:
        code: index of the type in kernels.
        span: number of elements whose codes are packed together: byte i holds element i of each piece.
        pieces: number of pieces of a span, and of codes in a byte; see block_tile.
        run: number of consecutive elements of a piece that share a scale.
    """

    code: int
    span: int
    pieces: int
    run: int


TYPES: Final = {
    "Q8_0": Type(0, 32, 1, 32),
    "Q4_0": Type(1, 32, 2, 16),
    "Q4_1": Type(2, 32, 2, 16),
    "Q5_0": Type(3, 32, 2, 16),
    "Q5_1": Type(4, 32, 2, 16),
    "IQ4_NL": Type(5, 32, 2, 16),
    "MXFP4": Type(6, 32, 2, 16),
    "Q4_K": Type(7, 64, 2, 32),
    "Q5_K": Type(8, 64, 2, 32),
    "Q6_K": Type(9, 128, 2, 16),
    "Q2_K": Type(10, 128, 4, 16),
    "Q3_K": Type(11, 128, 4, 16),
    "IQ4_XS": Type(12, 32, 2, 16),
}


@triton.jit
def gguf_values(rows, first, PIECE: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return float32 [outputs, runs, run], see `block_tile.tile_values`."""
    SHARED: tl.constexpr = TILE.span // TILE.pieces
    BITS: tl.constexpr = 8 // TILE.pieces
    run = tl.arange(0, TILE.runs)[None, :, None] * TILE.run
    at = run + tl.arange(0, TILE.run)[None, None, :]
    span = first // TILE.span + run // SHARED  # index in the row
    lane, run_lane = at % SHARED, run % SHARED  # indices of bytes in a span
    is_there = span * TILE.span < TILE.inner
    if TILE.code <= 6:
        return _of_32(rows, span, lane, is_there, PIECE, BITS, TILE.code)
    else:
        SPANS: tl.constexpr = 256 // TILE.span  # per block
        block, span = span // SPANS, span % SPANS
        return _of_256(rows, block, span, lane, run_lane, PIECE, BITS, TILE.code)


@triton.jit
def _of_32(  # type: ignore[no-untyped-def]
    rows, block, lane, is_there, PIECE: tl.constexpr, BITS: tl.constexpr, TYPE: tl.constexpr
):
    HAS_OFFSET: tl.constexpr = TYPE == 2 or TYPE == 4
    FIVE_BITS: tl.constexpr = TYPE == 3 or TYPE == 4
    HIGH: tl.constexpr = 1 if TYPE == 6 else 4 if HAS_OFFSET else 2  # byte offset of the fifth bits
    CODES: tl.constexpr = HIGH + 4 if FIVE_BITS else HIGH
    BYTES: tl.constexpr = CODES + 4 * BITS
    rows += block * BYTES
    codes = tl.load(rows + CODES + lane, mask=is_there, other=0)
    if TYPE == 0:
        return _half(rows, is_there) * codes.to(tl.int8, bitcast=True).to(tl.float32)
    codes = _bits(codes, PIECE, BITS)
    if FIVE_BITS:
        high = tl.load(rows + HIGH + PIECE * 2 + lane // 8, mask=is_there, other=0)
        codes |= ((high >> (lane % 8)) & 1) << 4
    if TYPE == 6:
        exponent = tl.load(rows, mask=is_there, other=0).to(tl.int32)
        # Half of the scale, since 2^128 would overflow; the smallest two are subnormal.
        bits = tl.where(exponent < 2, 0x00200000 << tl.minimum(exponent, 1), (exponent - 1) << 23)
        return bits.to(tl.float32, bitcast=True) * (2 * code_values(codes, 7))
    elif TYPE == 5:
        return _half(rows, is_there) * _uneven(codes)
    elif HAS_OFFSET:
        return _half(rows, is_there) * codes.to(tl.float32) + _half(rows + 2, is_there)
    else:
        return _half(rows, is_there) * (codes.to(tl.float32) - (16 if FIVE_BITS else 8))


@triton.jit
def _of_256(  # type: ignore[no-untyped-def]
    rows, block, span, lane, run_lane, PIECE: tl.constexpr, BITS: tl.constexpr, TYPE: tl.constexpr
):
    """Dequantize blocks of 256 elements. Rows consist of whole blocks, so loads need no mask."""
    if TYPE <= 8:  # Q4_K, Q5_K
        CODES: tl.constexpr = 16 if TYPE == 7 else 48
        rows += block * (CODES + 128)
        codes = _bits(tl.load(rows + CODES + span * 32 + lane), PIECE, BITS)
        unit = 2 * span + PIECE
        if TYPE == 8:
            codes |= ((tl.load(rows + 16 + lane) >> unit) & 1) << 4
        first, second = tl.load(rows + 4 + unit % 4), tl.load(rows + 8 + unit % 4)
        third = tl.load(rows + 12 + unit % 4)
        scale = tl.where(unit < 4, first & 63, (third & 15) | ((first >> 6) << 4))
        offset = tl.where(unit < 4, second & 63, (third >> 4) | ((second >> 6) << 4))
        d, least = _half(rows, True), _half(rows + 2, True)
        return (d * scale.to(tl.float32)) * codes.to(tl.float32) - least * offset.to(tl.float32)
    elif TYPE == 9:  # Q6_K
        rows += block * 210
        codes = _bits(tl.load(rows + span * 64 + lane), PIECE, BITS)
        high = tl.load(rows + 128 + span * 32 + lane % 32) >> (2 * (PIECE * 2 + run_lane // 32))
        number = (codes | ((high & 3) << 4)).to(tl.float32) - 32
        scale = tl.load(rows + 192 + span * 8 + PIECE * 4 + run_lane // 16).to(tl.int8, bitcast=True).to(tl.float32)
        return (_half(rows + 208, True) * scale) * number
    elif TYPE == 10:  # Q2_K
        rows += block * 84
        codes = _bits(tl.load(rows + 16 + span * 32 + lane), PIECE, BITS).to(tl.float32)
        both = tl.load(rows + span * 8 + PIECE * 2 + run_lane // 16)
        scale, offset = (both & 15).to(tl.float32), (both >> 4).to(tl.float32)
        return (_half(rows + 80, True) * scale) * codes - _half(rows + 82, True) * offset
    elif TYPE == 11:  # Q3_K
        rows += block * 110
        codes = _bits(tl.load(rows + 32 + span * 32 + lane), PIECE, BITS)
        codes |= ((tl.load(rows + lane) >> (span * 4 + PIECE)) & 1) << 2
        number = span * 8 + PIECE * 2 + run_lane // 16  # index of the scale
        low = (tl.load(rows + 96 + number % 8) >> (number // 8 * 4)) & 15
        high = (tl.load(rows + 104 + number % 4) >> (number // 4 * 2)) & 3
        scale = (low | (high << 4)).to(tl.float32) - 32
        return (_half(rows + 108, True) * scale) * (codes.to(tl.float32) - 4)
    else:  # IQ4_XS
        rows += block * 136
        codes = _bits(tl.load(rows + 8 + span * 16 + lane), PIECE, BITS)
        low = (tl.load(rows + 4 + span // 2) >> (span % 2 * 4)) & 15
        high = (tl.load(rows + 2 + span // 4) >> (span % 4 * 2)) & 3
        scale = (low | (high << 4)).to(tl.float32) - 32
        return (_half(rows, True) * scale) * _uneven(codes)


@triton.jit
def _bits(bytes, PIECE: tl.constexpr, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    return (bytes >> (PIECE * BITS)) & ((1 << BITS) - 1)


@triton.jit
def _half(pointers, mask):  # type: ignore[no-untyped-def]
    """Load float16 values as float32, byte by byte since blocks are not aligned."""
    low = tl.load(pointers, mask=mask, other=0).to(tl.uint16)
    high = tl.load(pointers + 1, mask=mask, other=0).to(tl.uint16)
    return (low | (high << 8)).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _uneven(codes):  # type: ignore[no-untyped-def]
    """Return the values of codes of IQ4_NL and IQ4_XS, from a table of 16 bytes in four words, from the low bits up."""
    lower, upper = (
        tl.where((codes & 4) == 0, -1079142271, -152379953),
        tl.where((codes & 4) == 0, 639175937, 1901675829),
    )
    word = tl.where((codes & 8) == 0, lower, upper)
    return (word >> ((codes & 3) * 8)).to(tl.int8).to(tl.float32)
