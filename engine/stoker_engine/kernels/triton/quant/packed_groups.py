"""Matrices in groups of integers, packed for GPUs: codes in tiles of 32-bit words, scales and zero points apart.

    rows      [outputs][scales, zero points, codes]                                as loaded (`kernels/group_blocks.py`)
    packed    words [outputs / 64][inner / columns of a tile][1024]
              scales [groups][outputs]
              zero points [groups][outputs], bytes

A tile has 64 rows and 16 words of each: 128 columns of 4 bits, or 64 of 8. Word i of a row holds columns i, i + 16,
i + 32 …, from its low bits up, so the same bits of all words are 16 adjacent columns: a *plane*. All codes are
unsigned; those of int8 have their high bit flipped, and a zero point of 128.

The words of a tile are in the order in which the threads of four warps hold the left operand of a tensor-core
instruction (PTX ISA, "Matrix fragments for mma.m16n8k16"): a tile is one coalesced load of 16 bytes a thread at a time,
and is unpacked by shifts and masks, without exchanging values between threads. Marlin (Frantar et al., 2024) introduced
this order.

    index of a word, bits from the high one down     w3 │ r5 r4 │ r2 r1 r0 │ w2 w1 │ r3 │ w0
    r: row in the tile, w: word of the row                  warp   lane             register

Packed matrices take exactly the bytes of their rows, so they are packed in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from stoker_engine.architectures.stored_formats import GGUFFormat, StoredFormat
from stoker_engine.kernels.group_blocks import SCALE_DTYPES, Parts, decode, implied_zero
from stoker_engine.kernels.triton.common.arithmetic import rounded
from stoker_engine.kernels.triton.quant.group_tile import SCALES
from stoker_engine.sizing.packed_weights import group_format

#: Rows of a tile, and words of each row.
ROWS: Final = 64
WORDS: Final = 16

#: Number of elements that are packed at a time, which bounds temporary memory.
_ELEMENTS: Final = 1 << 24


@dataclass(frozen=True)
class PackedTile:
    """Layout of the tiles of a packed matrix, a compile-time constant of kernels.

    Attributes:
        bits: bits of a code.
        columns: columns of a tile.
        group: number of columns that share a scale; 0: all.
        zero_point: zero point of all groups; -1: each has its own.
        scale: index of the scales' dtype in `SCALES`.
        rows: rows of a tile.
        words: words of a row of a tile.
    """

    bits: int
    columns: int
    group: int
    zero_point: int
    scale: int
    rows: int = ROWS
    words: int = WORDS


@dataclass(frozen=True)
class PackedMatrix:
    """The parts of a packed matrix as kernels read them: int32 views of its memory.

    Attributes:
        words: [outputs / 64, inner / columns of a tile, 1024].
        scales: [groups, words of `outputs` scales].
        zeros: [groups, outputs / 4], four zero points in a word; None if groups store none.
        tile: layout of the tiles.
    """

    words: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    tile: PackedTile

    @property
    def outputs(self) -> int:
        """Number of rows."""
        return len(self.words) * ROWS

    @property
    def inner(self) -> int:
        """Elements of a row."""
        return self.words.shape[1] * self.tile.columns


def tile_of(stored: StoredFormat, inner: int) -> PackedTile:
    """Return the layout of tiles for a format that is packed, and rows of `inner` elements."""
    format = group_format(stored)
    assert format is not None
    zero_point = -1 if format.zero else 128 if format.code == "int8" else implied_zero(format.code)
    columns, group = WORDS * 32 // format.bits, format.for_rows(inner).group
    return PackedTile(format.bits, columns, group, zero_point, SCALES[format.scale])


def fit(blocks: torch.Tensor, stored: StoredFormat, inner: int, dtype: torch.dtype) -> bool:
    """See `BlockPanels.fit`: whole tiles of formats with integer codes and scales of their own."""
    if group_format(stored) is None or not blocks.is_contiguous() or not blocks.numel():
        return False
    has_tiles = len(blocks) % ROWS == 0 and inner % tile_of(stored, inner).columns == 0
    return has_tiles and int(blocks.storage_offset()) % 16 == 0


def pack(blocks: torch.Tensor, stored: StoredFormat, inner: int) -> None:
    """See `BlockPanels.pack`. Needs temporary memory for the scales, and for the codes of some rows."""
    tile = tile_of(stored, inner)
    into_words, into_scales, into_zeros = _parts(blocks, stored, inner)
    scales, zeros = [], []
    step = max(1, _ELEMENTS // (inner * ROWS)) * ROWS
    for start in range(0, len(blocks), step):
        parts = _decode(blocks[start : start + step], stored, inner)
        scales.append(parts.scales.to(into_scales.dtype))
        zeros.append(parts.zeros.to(torch.uint8))
        # The words of these rows end before the blocks of the next ones, which are still to be read.
        words = _words(parts.codes, tile)
        into_words[start // ROWS : start // ROWS + len(words)] = words
    into_scales.copy_(torch.cat(scales).t())
    if into_zeros is not None:
        into_zeros.copy_(torch.cat(zeros).t())


def packed_matrix(blocks: torch.Tensor, stored: StoredFormat, inner: int) -> PackedMatrix:
    """Return the parts of a packed matrix. They are views, so the matrix may be packed later."""
    words, scales, zeros = _parts(blocks, stored, inner)
    zero_words = None if zeros is None else zeros.view(torch.int32)
    return PackedMatrix(words, scales.view(torch.int32), zero_words, tile_of(stored, inner))


def rows(blocks: torch.Tensor, stored: StoredFormat, inner: int, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """See `BlockPanels.rows`.

    Raises:
        IndexError: an id is out of range (on a CPU).
    """
    tile = tile_of(stored, inner)
    words, scales, zeros = _parts(blocks, stored, inner)
    order = torch.arange(ROWS * WORDS, device=ids.device).view(2, 4, 8, 4, 2, 2)
    order = order.permute(1, 4, 2, 0, 3, 5).reshape(ROWS, WORDS)
    column_tiles = torch.arange(words.shape[1], device=ids.device)
    found = words[(ids // ROWS)[:, None, None], column_tiles[:, None], order[ids % ROWS].unsqueeze(1)]
    shifts = torch.arange(0, 32, tile.bits, device=ids.device, dtype=torch.int32).view(-1, 1)
    codes = ((found.unsqueeze(2) >> shifts) & ((1 << tile.bits) - 1)).flatten(1).float()
    scale = scales.index_select(1, ids).t().float()
    zero = torch.full_like(scale, tile.zero_point) if zeros is None else zeros.index_select(1, ids).t().float()
    if tile.group:
        scale, zero = (each.repeat_interleave(tile.group, dim=1)[:, :inner] for each in (scale, zero))
    return (scale * (codes - zero)).to(dtype)


def _parts(
    blocks: torch.Tensor, stored: StoredFormat, inner: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return views of a packed matrix: words, scales [groups, outputs] in their dtype, and zero points, uint8 [groups,
    outputs], or None."""
    format = group_format(stored)
    assert format is not None
    outputs, groups, dtype = len(blocks), format.groups(inner), SCALE_DTYPES[format.scale]
    sizes = outputs * inner * format.bits // 8, groups * outputs * dtype.itemsize, groups * outputs * format.zero
    words, scales, zeros = blocks.view(-1).split(sizes)
    return (
        words.view(torch.int32).view(outputs // ROWS, -1, ROWS * WORDS),
        scales.view(dtype).view(groups, outputs),
        zeros.view(groups, outputs) if format.zero else None,
    )


def _decode(blocks: torch.Tensor, stored: StoredFormat, inner: int) -> Parts:
    """Return the parts of some rows, with unsigned codes."""
    format = group_format(stored)
    assert format is not None
    if isinstance(stored, GGUFFormat):
        # A row of groups has the same bytes in another order: first the scales, then the codes.
        scales, codes = blocks.unflatten(1, (-1, stored.bytes)).tensor_split([2], dim=2)
        blocks = torch.cat((scales.flatten(1), codes.flatten(1)), dim=1)
    parts = decode(blocks, format, inner)
    return parts._replace(codes=parts.codes ^ 0x80) if format.code == "int8" else parts


def _words(codes: torch.Tensor, tile: PackedTile) -> torch.Tensor:
    """Return the words of uint8 codes [rows, inner]: int32 [rows / 64, tiles of a row, 1024]."""
    planes = 32 // tile.bits
    # [tiles, r5 r4, r3, r2 r1 r0, tiles of a row, planes, w3, w2 w1, w0]
    apart = codes.view(-1, 4, 2, 8, codes.shape[1] // tile.columns, planes, 2, 4, 2)
    ordered = apart.permute(0, 4, 6, 1, 3, 7, 2, 8, 5)
    if tile.bits == 4:
        ordered = ordered[..., ::2] | ordered[..., 1::2] << 4
    return ordered.contiguous().view(torch.int32).view(len(codes) // ROWS, -1, ROWS * WORDS)


@triton.jit
def tile_weights(  # type: ignore[no-untyped-def]
    words,
    scales,
    zeros,
    row_tile,
    column_tile,
    column_tiles,
    outputs,
    TILE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Return the dequantized elements of a tile, [rows, columns] in DTYPE.

    Args:
        words, scales, zeros: the parts of the matrix (`PackedMatrix`).
        row_tile, column_tile: indices of the tile.
        column_tiles: number of tiles of a row.
        outputs: rows of the matrix.
    """
    ROWS: tl.constexpr = TILE.rows
    WORDS: tl.constexpr = TILE.words
    COLUMNS: tl.constexpr = TILE.columns
    at = (row_tile.to(tl.int64) * column_tiles + column_tile) * (ROWS * WORDS)
    held = tl.load(words + at + tl.arange(0, ROWS * WORDS))
    held = held.reshape(2, 4, 8, 4, 2, 2).permute(1, 4, 2, 0, 3, 5).reshape(ROWS, WORDS)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    planes = _planes(held, scales, zeros, row, column_tile * COLUMNS, outputs, 0, COLUMNS // WORDS, TILE, DTYPE)
    ordered = planes.permute(0, 4, 3, 2, 1) if TILE.bits == 4 else planes.permute(0, 3, 2, 1)
    return ordered.reshape(ROWS, COLUMNS)


@triton.jit
def _planes(  # type: ignore[no-untyped-def]
    held,
    scales,
    zeros,
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
        group = 0 if TILE.group == 0 else (first + PLANE * TILE.words) // TILE.group
        scale = _scale(scales, group, row, outputs, TILE.scale)
        zero = None
        if TILE.zero_point < 0:
            zero = (tl.load(zeros + group * (outputs // 4) + row // 4) >> row % 4 * 8) & 255
            zero = zero[:, None]
        return _scaled_planes(held, scale[:, None], zero, PLANE, COUNT, TILE, DTYPE)
    else:
        HALF: tl.constexpr = COUNT // 2
        low = _planes(held, scales, zeros, row, first, outputs, PLANE, HALF, TILE, DTYPE)
        high = _planes(held, scales, zeros, row, first, outputs, PLANE + HALF, HALF, TILE, DTYPE)
        return tl.join(low, high)


@triton.jit
def _scaled_planes(  # type: ignore[no-untyped-def]
    held,
    scale,
    zero,
    PLANE: tl.constexpr,
    COUNT: tl.constexpr,
    TILE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """See `_planes`.

    Args:
        scale, zero: float32 and int32 [rows, 1]; zero is None if it is the format's.
    """
    if COUNT == 1:
        # Bits of a word become the low bits of a float32 whose last place is 1, in one operation and without a
        # conversion: 2^(23 - SHIFT) + code. The difference to 2^(23 - SHIFT) + zero point is exact.
        SHIFT: tl.constexpr = PLANE * TILE.bits % 16
        POWER: tl.constexpr = 0x4B000000 - (SHIFT << 23)
        MASK: tl.constexpr = ((1 << TILE.bits) - 1) << SHIFT
        half = held if PLANE * TILE.bits < 16 else held >> 16
        code = ((half & MASK) | POWER).to(tl.float32, bitcast=True)
        if zero is None:
            difference = code - (8388608.0 / (1 << SHIFT) + TILE.zero_point)
        else:
            difference = code - ((zero << SHIFT) | POWER).to(tl.float32, bitcast=True)
        return rounded(scale * difference, DTYPE)
    else:
        HALF: tl.constexpr = COUNT // 2
        low = _scaled_planes(held, scale, zero, PLANE, HALF, TILE, DTYPE)
        high = _scaled_planes(held, scale, zero, PLANE + HALF, HALF, TILE, DTYPE)
        return tl.join(low, high)


@triton.jit
def _scale(scales, group, row, outputs, SCALE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the scales of some rows as float32. Whole words are loaded, and half of each is taken: compilers load only
    words ahead, and choose another layout for the tensor cores if they see smaller loads."""
    if SCALE == 0:
        return tl.load(scales + group * outputs + row).to(tl.float32, bitcast=True)
    half = (tl.load(scales + group * (outputs // 2) + row // 2) >> row % 2 * 16) & 0xFFFF
    if SCALE == 1:
        return half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return (half << 16).to(tl.float32, bitcast=True)
