"""Dequantization of tiles of matrices in blocks (`architectures.stored_formats`).

Codes of less than 8 bits share bytes: the first codes of a span of elements are in the low bits, the next ones in the
bits above. A tile is read in as many pieces as codes share a byte; each piece takes the same bits of all bytes. Instead
of interleaving the pieces, kernels read the columns of the other matrix in the pieces' order:

    a span of 32, 4 bits       byte i has n(i) and n(i + 16)       piece 0: n(0) … n(15)       piece 1: n(16) … n(31)

A piece consists of runs of elements that share a scale: [outputs, runs, run].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import triton
import triton.language as tl

from stoker_engine.architectures.stored_formats import UNIT, GGUFFormat, StoredFormat
from stoker_engine.kernels.group_blocks import implied_zero
from stoker_engine.kernels.triton.quant.gguf_tile import TYPES, gguf_values
from stoker_engine.kernels.triton.quant.group_tile import CODES, SCALES, group_values

#: Number of elements of a row in a piece.
_PIECE: Final = 64


@dataclass(frozen=True)
class Tile:
    """Layout of a tile, a compile-time constant of kernels.

    Attributes:
        inner: elements of a row.
        elements: elements of a row in the tile.
        pieces: number of pieces of the tile.
        span: number of elements whose codes are packed together: byte i holds element i of each piece.
        runs: number of runs in a row of a piece.
        run: number of elements in a run.
        code: index of the code's type; for GGUF of the block's type.
        is_gguf: whether the format is one of GGUF's types.
        group: number of elements that share a scale; `inner` if a row is a single group.
        scale: index of the scales' type.
        row_scale: whether rows start with a scale of their own.
        zero: whether groups have stored zero points.
        implied_zero: zero point if none are stored.
    """

    inner: int
    elements: int
    pieces: int
    span: int
    runs: int
    run: int
    code: int
    is_gguf: bool
    group: int = 0
    scale: int = 0
    row_scale: bool = False
    zero: bool = False
    implied_zero: int = 0


def has_tiles(stored: StoredFormat) -> bool:
    """Whether a format can be read in tiles: all except GGUF's F16 and BF16, which have no codes."""
    return not isinstance(stored, GGUFFormat) or stored.name in TYPES


def tile_of(stored: StoredFormat, inner: int) -> Tile:
    """Return the layout of tiles for rows of `inner` elements."""
    if isinstance(stored, GGUFFormat):
        code, span, pieces, run = TYPES[stored.name]
        return Tile(inner, _PIECE * pieces, pieces, span, _PIECE // run, run, code, True)
    group = stored.for_rows(inner).group or inner
    pieces = {8: 1, 4: 2, 3: 4, 2: 4}[stored.bits]
    shared = UNIT // pieces
    # The longest run that never crosses groups.
    run = _PIECE
    while run > min(shared, 16) and group < inner and group % (run * pieces):
        run //= 2
    return Tile(
        inner,
        _PIECE * pieces,
        pieces,
        UNIT,
        _PIECE // run,
        run,
        CODES[stored.code],
        False,
        group,
        SCALES[stored.scale],
        stored.row_scale,
        stored.zero,
        implied_zero(stored.code),
    )


@triton.jit
def columns(first, PIECE: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the columns of a piece's elements, int32 [runs × run], for the tile that starts at column `first`."""
    SHARED: tl.constexpr = TILE.span // TILE.pieces
    at = tl.arange(0, TILE.runs * TILE.run)
    return first + at // SHARED * TILE.span + PIECE * SHARED + at % SHARED


@triton.jit
def tile_values(rows, first, PIECE: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the dequantized elements at `columns` of some rows; 0 beyond a row's end.

    Args:
        rows: pointers to the first byte of each row, [outputs].

    Returns:
        float32 [outputs, runs × run].
    """
    if TILE.is_gguf:
        found = gguf_values(rows[:, None, None], first, PIECE, TILE)
    else:
        found = group_values(rows[:, None, None], first, PIECE, TILE)
    found = found.reshape(rows.shape[0], TILE.runs * TILE.run)
    if TILE.inner % TILE.elements:
        found = tl.where(columns(first, PIECE, TILE)[None, :] < TILE.inner, found, 0.0)
    return found
