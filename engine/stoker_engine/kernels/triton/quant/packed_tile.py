"""Dequantization of tiles of packed matrices (`packed_layout`)."""

from __future__ import annotations

import triton
import triton.language as tl

from stoker_engine.kernels.triton.common.arithmetic import rounded
from stoker_engine.kernels.triton.common.float8 import decode


@triton.jit
def tile_weights(  # type: ignore[no-untyped-def]
    matrix,
    row_tile,
    column_tile,
    row_tiles,
    column_tiles,
    TILE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Return the dequantized elements of a tile, [rows, columns] in DTYPE.

    Args:
        matrix: pointer to the words of the matrix (`PackedMatrix`).
        row_tile, column_tile: indices of the tile.
        row_tiles, column_tiles: number of tiles of a column and of a row of the matrix.
    """
    ROWS: tl.constexpr = TILE.rows
    WORDS: tl.constexpr = TILE.words
    WARPS: tl.constexpr = WORDS // 8
    at = (row_tile.to(tl.int64) * column_tiles + column_tile) * (ROWS * WORDS)
    held = tl.load(matrix + at + tl.arange(0, ROWS * WORDS))
    held = held.reshape(WARPS, 4, 8, 4, 2, 2).permute(1, 4, 2, 0, 3, 5).reshape(ROWS, WORDS)
    high = None
    if TILE.high:
        HIGH: tl.constexpr = TILE.high
        from_high = matrix + row_tiles.to(tl.int64) * column_tiles * (ROWS * WORDS) + at * HIGH // 4
        high = tl.load(from_high + tl.arange(0, ROWS * WORDS * HIGH // 4)).reshape(WARPS, 4, 8, 4, HIGH, 1)
        high = high >> (tl.arange(0, 4 // HIGH) * 8 * HIGH).reshape(1, 1, 1, 1, 2 // HIGH, 2)
        high = high.permute(1, 4, 2, 0, 3, 5).reshape(ROWS, WORDS)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    return row_weights(matrix, held, high, row, column_tile, row_tiles, column_tiles, TILE, DTYPE)


@triton.jit
def row_weights(  # type: ignore[no-untyped-def]
    matrix,
    held,
    high,
    row,
    column_tile,
    row_tiles,
    column_tiles,
    TILE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Return the dequantized elements of some rows in a tile's columns, [rows, columns] in DTYPE.

    Args:
        held: the words of these rows, [rows, words].
        high: their high bits in the low bits of int32, [rows, words]; None if codes have none.
        row: indices of the rows.
        matrix, column_tile, row_tiles, column_tiles: see `tile_weights`.
    """
    outputs = row_tiles * TILE.rows
    # A constant if each row has one scale.
    groups = 1 if TILE.group == 0 else tl.cdiv(column_tiles * TILE.columns, TILE.group)
    SCALE: tl.constexpr = TILE.scale
    scales = matrix + outputs.to(tl.int64) * column_tiles * TILE.words * (4 + TILE.high) // 4
    if SCALE == 6 or SCALE == 7:
        seconds = scales + outputs.to(tl.int64) * (column_tiles * TILE.columns // 64)
    elif SCALE == 0 or SCALE == 5:
        seconds = scales + outputs.to(tl.int64) * groups
    elif SCALE == 1 or SCALE == 2:
        seconds = scales + outputs.to(tl.int64) // 2 * groups
    else:
        seconds = scales + outputs.to(tl.int64) // 4 * groups
    first = column_tile * TILE.columns
    COUNT: tl.constexpr = TILE.columns // TILE.words
    planes = _planes(held, high, scales, seconds, row, first, outputs, 0, COUNT, TILE, DTYPE)
    ordered = planes.permute(0, 4, 3, 2, 1) if TILE.bits == 4 else planes.permute(0, 3, 2, 1)
    return ordered.reshape(held.shape[0], TILE.columns)


@triton.jit
def _planes(  # type: ignore[no-untyped-def]
    held,
    high,
    scales,
    seconds,
    row,
    first,
    outputs,
    PLANE: tl.constexpr,
    COUNT: tl.constexpr,
    TILE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Return planes PLANE … PLANE + COUNT - 1 of a tile in DTYPE: [rows, words, 2, 2 …], where the last dimension is
    the highest bit of a plane's index."""
    if TILE.group % (COUNT * TILE.words) == 0:  # the planes share their scales
        scale = _scale(scales, seconds, row, first, outputs, PLANE, TILE)
        zero = None
        if TILE.zero_point < 0:
            group = 0 if TILE.group == 0 else (first + PLANE * TILE.words) // TILE.group
            zero = _byte(seconds, group, row, outputs)[:, None]
        offset = None
        if TILE.scale == 5 or TILE.scale == 6:
            offset = _offset(scales, row, first, outputs, PLANE, TILE)[:, None]
        return _scaled_planes(held, high, scale[:, None], zero, offset, PLANE, COUNT, TILE, DTYPE)
    else:
        HALF: tl.constexpr = COUNT // 2
        low = _planes(held, high, scales, seconds, row, first, outputs, PLANE, HALF, TILE, DTYPE)
        upper = _planes(held, high, scales, seconds, row, first, outputs, PLANE + HALF, HALF, TILE, DTYPE)
        return tl.join(low, upper)


@triton.jit
def _scaled_planes(  # type: ignore[no-untyped-def]
    held,
    high,
    scale,
    zero,
    offset,
    PLANE: tl.constexpr,
    COUNT: tl.constexpr,
    TILE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """See `_planes`.

    Args:
        scale: float32 [rows, 1].
        zero: int32 [rows, 1]; None if the zero point is the format's.
        offset: float32 [rows, 1], which is added to the scaled codes; None if the format has none.
    """
    if COUNT == 1:
        if TILE.is_fp4:
            value = _fp4(held, PLANE, 1.7014118346046923e38 if TILE.scale == 8 else 8.507059173023462e37)
        else:
            value = _integer(held, high, zero, PLANE, TILE)
        scaled = scale * value
        return rounded(scaled if offset is None else scaled + offset, DTYPE)
    else:
        HALF: tl.constexpr = COUNT // 2
        low = _scaled_planes(held, high, scale, zero, offset, PLANE, HALF, TILE, DTYPE)
        upper = _scaled_planes(held, high, scale, zero, offset, PLANE + HALF, HALF, TILE, DTYPE)
        return tl.join(low, upper)


@triton.jit
def _integer(held, high, zero, PLANE: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the differences of a plane's codes and their zero points, float32 [rows, words].

    Bits of a word become the low bits of a float32 whose last place is 1, in one operation and without a conversion:
    2^(23 - SHIFT) + code. The difference to 2^(23 - SHIFT) + zero point is exact.
    """
    SHIFT: tl.constexpr = PLANE * TILE.bits % 16
    POWER: tl.constexpr = 0x4B000000 - (SHIFT << 23)
    MASK: tl.constexpr = ((1 << TILE.bits) - 1) << SHIFT
    half = held if PLANE * TILE.bits < 16 else held >> 16
    bits = (half & MASK) | POWER
    if TILE.high:
        TO: tl.constexpr = SHIFT + 4 - PLANE * TILE.high
        moved = high << TO if TO >= 0 else high >> -TO
        bits |= moved & (((1 << TILE.high) - 1) << (SHIFT + 4))
    code = bits.to(tl.float32, bitcast=True)
    if zero is None:
        return code - (8388608.0 / (1 << SHIFT) + TILE.zero_point)
    else:
        return code - ((zero << SHIFT) | POWER).to(tl.float32, bitcast=True)


@triton.jit
def _fp4(held, PLANE: tl.constexpr, FACTOR: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the values of a plane's codes of FP4, float32 [rows, words]. As the highest bits of a float32's fraction
    and the lowest of its exponent, they are too small by 2^126.

    Args:
        FACTOR: 2^126, or 2^127 for twice the values.
    """
    sign = (held << (28 - PLANE * 4)) & -2147483648
    return (sign | (((held >> (PLANE * 4)) & 7) << 22)).to(tl.float32, bitcast=True) * FACTOR


@triton.jit
def _scale(  # type: ignore[no-untyped-def]
    scales, seconds, row, first, outputs, PLANE: tl.constexpr, TILE: tl.constexpr
):
    """Return the scales of some rows for a plane, as float32. Whole words are loaded, and a part of each is taken:
    compilers load only words ahead, and choose another layout for the tensor cores if they see smaller loads."""
    SCALE: tl.constexpr = TILE.scale
    group = 0 if TILE.group == 0 else (first + PLANE * TILE.words) // TILE.group
    if SCALE == 0:
        return tl.load(scales + group * outputs + row).to(tl.float32, bitcast=True)
    elif SCALE == 1:
        return _as_half(_half(scales, group, row, outputs))
    elif SCALE == 2:
        return (_half(scales, group, row, outputs) << 16).to(tl.float32, bitcast=True)
    elif SCALE == 3:
        exponent = _byte(scales, group, row, outputs)
        # 2^-127 is subnormal; 255 is NaN.
        bits = tl.where(exponent == 0, 0x00400000, tl.where(exponent == 255, 0x7FC00000, exponent << 23))
        return bits.to(tl.float32, bitcast=True)
    elif SCALE == 4:
        scale = decode(_byte(scales, group, row, outputs), 1, tl.float32)
        return tl.load(seconds + row).to(tl.float32, bitcast=True) * scale if TILE.row_scale else scale
    elif SCALE == 5:
        return _as_half(tl.load(scales + group * outputs + row) & 0xFFFF)
    elif SCALE == 6:
        of_block = scales + first // 256 * 4 * outputs + row
        low, last = tl.load(of_block + outputs), tl.load(of_block + 3 * outputs)
        both = tl.where(first % 256 == 0, low & 0x3F3F3F3F, (last & 0x0F0F0F0F) | ((low >> 2) & 0x30303030))
        return _as_half(tl.load(of_block) & 0xFFFF) * ((both >> (PLANE // 2 * 8)) & 63).to(tl.float32)
    elif SCALE == 7:
        word = tl.load(scales + (first // 64 + PLANE // 4) * outputs + row)
        number = ((word << (24 - PLANE % 4 * 8)) >> 24).to(tl.float32)
        return _as_half(_half(seconds, first // 256, row, outputs)) * number
    else:
        exponent = _byte(scales, group, row, outputs)
        # Half of the scale, since 2^128 would overflow; the smallest two are subnormal.
        bits = tl.where(exponent < 2, 0x00200000 << tl.minimum(exponent, 1), (exponent - 1) << 23)
        return bits.to(tl.float32, bitcast=True)


@triton.jit
def _offset(scales, row, first, outputs, PLANE: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the offsets that are added to the scaled codes of some rows in a plane, as float32."""
    if TILE.scale == 5:
        group = (first + PLANE * TILE.words) // TILE.group
        return _as_half((tl.load(scales + group * outputs + row) >> 16) & 0xFFFF)
    else:
        of_block = scales + first // 256 * 4 * outputs + row
        low, last = tl.load(of_block + 2 * outputs), tl.load(of_block + 3 * outputs)
        both = tl.where(first % 256 == 0, low & 0x3F3F3F3F, ((last >> 4) & 0x0F0F0F0F) | ((low >> 2) & 0x30303030))
        unit = _as_half((tl.load(of_block) >> 16) & 0xFFFF)
        return -(unit * ((both >> (PLANE // 2 * 8)) & 63).to(tl.float32))


@triton.jit
def _half(parts, group, row, outputs):  # type: ignore[no-untyped-def]
    """Return 16 bits for each of some rows, as int32."""
    return (tl.load(parts + group * (outputs // 2) + row // 2) >> row % 2 * 16) & 0xFFFF


@triton.jit
def _byte(parts, group, row, outputs):  # type: ignore[no-untyped-def]
    """Return a byte for each of some rows, as int32."""
    return (tl.load(parts + group * (outputs // 4) + row // 4) >> row % 4 * 8) & 255


@triton.jit
def _as_half(bits):  # type: ignore[no-untyped-def]
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
