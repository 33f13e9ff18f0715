"""Quantized matrices, packed for GPUs: codes in tiles of 32-bit words, scales and zero points apart.

    rows      [outputs][scales, zero points, codes], or GGUF's blocks              as loaded (`kernels/group_blocks.py`,
                                                                                   `kernels/gguf_blocks.py`)
    packed    words [outputs / 64][inner / columns of a tile][64 × words of a row]
              high bits, in the same order
              scales [groups][outputs]
              seconds [groups][outputs]: zero points, scales of rows, or scales of scales

A tile has 64 rows and 16 words of each: 128 columns of 4 bits, or 64 of 8. If these do not divide the matrix, a tile
has 8 words of each row. Word i of a row of 16 words holds columns i, i + 16, i + 32 …, from its low bits up, so the
same bits of all words are 16 adjacent columns: a *plane*. All codes of integers are unsigned; those of int8 have their
high bit flipped, and a zero point of 128.

The words of a tile are in the order in which the threads of four warps hold the left operand of a tensor-core
instruction (PTX ISA, "Matrix fragments for mma.m16n8k16"): a tile is one coalesced load of 16 bytes a thread at a time,
and is unpacked by shifts and masks, without exchanging values between threads. Marlin (Frantar et al., 2024) introduced
this order.

    index of a word, bits from the high one down     w3 │ r5 r4 │ r2 r1 r0 │ w2 w1 │ r3 │ w0
    r: row in the tile, w: word of the row                  warp   lane             register

Codes of 5 and 6 bits have their low 4 bits in the words. For each word there are a byte or two of high bits: 1 or 2 for
each plane, from the low bits up, in the order of the words.

The scales and offsets of GGUF's types stay as they are in the blocks, since no other form is as small and has the same
bits:

    kind       scales                                 seconds         types
    pairs      d and m, float16                                       Q4_1, Q5_1
    six bits   the first 16 bytes of a block: 4 words                 Q4_K, Q5_K
    bytes      the 16 bytes of a block: 4 words       d, float16      Q6_K

Packed matrices take exactly the bytes of their rows, so they are packed in place (`pack.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from stoker_engine.architectures.stored_formats import GGUFFormat, StoredFormat
from stoker_engine.kernels.group_blocks import implied_zero
from stoker_engine.kernels.triton.quant.group_tile import SCALES
from stoker_engine.sizing.packed_weights import is_packed

#: Rows of a tile.
ROWS: Final = 64

#: Kinds of scales in kernels: `SCALES`, and those of GGUF's types, of which `E8M0_FINITE` (MXFP4) has no NaN.
PAIRS: Final = 5
SIX_BITS: Final = 6
BYTES: Final = 7
E8M0_FINITE: Final = 8


@dataclass(frozen=True)
class PackedTile:
    """Layout of the tiles of a packed matrix, a compile-time constant of kernels.

    Attributes:
        bits: bits of a code in a word.
        high: further bits of a code.
        words: words of a row of a tile.
        columns: columns of a tile.
        group: number of columns that share a scale; 0: all.
        is_fp4: 1 if codes are OCP's FP4 (e2m1); 0: integers.
        zero_point: zero point of all groups; -1: each has its own.
        scale: kind of the scales.
        row_scale: 1 if each row has a factor of its scales, float32; else 0.
        rows: rows of a tile.
    """

    bits: int
    high: int
    words: int
    columns: int
    group: int
    is_fp4: int
    zero_point: int
    scale: int
    row_scale: int
    rows: int = ROWS


@dataclass(frozen=True)
class PackedMatrix:
    """A packed matrix, or a stack of them, as kernels read it.

    Attributes:
        memory: int32 [words of a matrix], or [count, words of a matrix].
        outputs: number of rows of a matrix.
        inner: elements of a row.
        tile: layout of the tiles.
    """

    memory: torch.Tensor
    outputs: int
    inner: int
    tile: PackedTile


#: GGUF's type → bits in words, high bits, columns that share a scale, zero point, kind of the scales.
_TYPES: Final = {
    "Q4_0": (4, 0, 32, 8, SCALES["float16"]),
    "Q4_1": (4, 0, 32, 0, PAIRS),
    "Q5_0": (4, 1, 32, 16, SCALES["float16"]),
    "Q5_1": (4, 1, 32, 0, PAIRS),
    "Q8_0": (8, 0, 32, 128, SCALES["float16"]),
    "Q4_K": (4, 0, 32, 0, SIX_BITS),
    "Q5_K": (4, 1, 32, 0, SIX_BITS),
    "Q6_K": (4, 2, 16, 32, BYTES),
    "MXFP4": (4, 0, 32, 0, E8M0_FINITE),
}


def tile_of(stored: StoredFormat, inner: int) -> PackedTile:
    """Return the layout of tiles for a format that is packed, and rows of `inner` elements."""
    if isinstance(stored, GGUFFormat):
        bits, high, group, zero_point, scale = _TYPES[stored.name]
        is_fp4, row_scale = stored.name == "MXFP4", False
    else:
        bits, high, group, scale = stored.bits, 0, stored.for_rows(inner).group, SCALES[stored.scale]
        zero_point = -1 if stored.zero else 128 if stored.code == "int8" else implied_zero(stored.code)
        is_fp4, row_scale = stored.code == "fp4", stored.row_scale
    words = 16 if inner % (16 * 32 // bits) == 0 else 8
    return PackedTile(bits, high, words, words * 32 // bits, group, int(is_fp4), zero_point, scale, int(row_scale))


def fit(blocks: torch.Tensor, stored: StoredFormat, inner: int, dtype: torch.dtype) -> bool:
    """See `BlockPanels.fit`: whole tiles of formats that are packed."""
    if not is_packed(stored) or not blocks.is_contiguous() or not blocks.numel():
        return False
    has_tiles = blocks.shape[-2] % ROWS == 0 and inner % tile_of(stored, inner).columns == 0
    return has_tiles and int(blocks.storage_offset()) % 16 == 0


def packed_matrix(blocks: torch.Tensor, stored: StoredFormat, inner: int) -> PackedMatrix:
    """Return a packed matrix, or a stack of them, as kernels read it: a view, so it may be packed later."""
    memory = blocks.flatten(-2).view(torch.int32)
    return PackedMatrix(memory, blocks.shape[-2], inner, tile_of(stored, inner))
