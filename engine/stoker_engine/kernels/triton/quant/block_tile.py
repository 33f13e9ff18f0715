"""Tiles of matrices that are stored in blocks (`architectures.stored_formats`), as the numbers they stand for.

Codes of few bits share bytes: those of a span of elements, the first of them in the low bits, the next of them in the
bits above. A tile is read in as many pieces, each of which takes the same bits of all bytes; so nothing has to be
interleaved, where columns of the other matrix are picked in the same way:

    a span of 32, 4 bits       byte i has n(i) and n(i + 16)       piece 0: n(0) … n(15)       piece 1: n(16) … n(31)

A piece has runs of elements that share a scale: [outputs, runs, run].
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

#: Numbers of a row that a piece has.
_PIECE: Final = 64


@dataclass(frozen=True)
class Tile:
    """How a format is read: what kernels are compiled for.

    Attributes:
        inner: elements of a row.
        elements: of a row, that a tile has.
        pieces: that it is read in.
        span: elements that share bytes.
        runs: of a piece.
        run: elements of a run.
        code: what a number is stored as; of GGUF's types, which.
        is_gguf: whether it is one of them.
        group: elements that share a scale; those of a row, where that is one group.
        scale: what scales are stored as.
        row_scale: whether rows begin with a scale of their own.
        zero: whether groups have zero points of their own.
        implied_zero: the zero point of all others.
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
    """Whether a format is read in tiles: all but GGUF's F16 and BF16, which are no codes."""
    return not isinstance(stored, GGUFFormat) or stored.name in TYPES


def tile_of(stored: StoredFormat, inner: int) -> Tile:
    """How rows of `inner` elements are read."""
    if isinstance(stored, GGUFFormat):
        code, span, pieces, run = TYPES[stored.name]
        return Tile(inner, _PIECE * pieces, pieces, span, _PIECE // run, run, code, True)
    group = stored.for_rows(inner).group or inner
    pieces = {8: 1, 4: 2, 3: 4, 2: 4}[stored.bits]
    shared = UNIT // pieces
    # The longest run that lies in one group wherever it begins.
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
    """int32 [runs × run]: which elements of their row a piece has, of the tile that begins at number `first`."""
    SHARED: tl.constexpr = TILE.span // TILE.pieces
    at = tl.arange(0, TILE.runs * TILE.run)
    return first + at // SHARED * TILE.span + PIECE * SHARED + at % SHARED


@triton.jit
def tile_values(rows, first, PIECE: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The elements at `columns` of some rows; 0 beyond a row's end.

    Args:
        rows: where each row begins, pointers to bytes [outputs].

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
