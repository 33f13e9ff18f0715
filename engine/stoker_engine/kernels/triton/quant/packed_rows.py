"""Lookup of rows of a packed matrix (`packed_layout`): a program dequantizes some rows in the columns of a tile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple
from typing import Final

import torch
import triton
import triton.language as tl

from stoker_engine.architectures.stored_formats import GGUF_FORMATS, StoredFormat
from stoker_engine.kernels.triton.common.gpu_target import GpuTarget
from stoker_engine.kernels.triton.common.kernel_variant import KernelVariant
from stoker_engine.kernels.triton.common.operation import operation
from stoker_engine.kernels.triton.quant.packed_layout import ROWS, PackedTile, packed_matrix, tile_of
from stoker_engine.kernels.triton.quant.packed_tile import row_weights

#: Rows of a program.
_IDS: Final = 16
_WARPS: Final = 4


@triton.jit(do_not_specialize=["count", "row_tiles", "column_tiles"])
def _packed_rows(  # type: ignore[no-untyped-def]
    matrix,
    ids,
    out,
    count,
    row_tiles,
    column_tiles,
    TILE: tl.constexpr,
    IDS: tl.constexpr,
):
    ROWS: tl.constexpr = TILE.rows
    WORDS: tl.constexpr = TILE.words
    number = tl.program_id(0) // column_tiles * IDS + tl.arange(0, IDS)
    column_tile = tl.program_id(0) % column_tiles
    row = tl.load(ids + number, mask=number < count, other=0).to(tl.int32)
    in_tile, word = row % ROWS, tl.arange(0, WORDS)
    of_row = (in_tile // 16 << 7) | (in_tile % 8 << 4) | (in_tile // 8 % 2 << 1)
    index = of_row[:, None] | (word // 8 << 9 | word // 2 % 4 << 2 | word % 2)[None, :]
    at = ((row // ROWS).to(tl.int64) * column_tiles + column_tile)[:, None] * (ROWS * WORDS)
    held = tl.load(matrix + at + index)
    high = None
    if TILE.high:
        HIGH: tl.constexpr = TILE.high
        from_high = matrix + row_tiles.to(tl.int64) * column_tiles * (ROWS * WORDS) + at * HIGH // 4
        high = tl.load(from_high + index * HIGH // 4) >> (index * HIGH % 4 * 8)
    weights = row_weights(matrix, held, high, row, column_tile, row_tiles, column_tiles, TILE, out.dtype.element_ty)
    COLUMNS: tl.constexpr = TILE.columns
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    to = out + number[:, None].to(tl.int64) * (column_tiles * COLUMNS) + column[None, :]
    tl.store(to, weights, mask=(number < count)[:, None])


@operation("stoker::packed_rows")
def _run(
    matrix: torch.Tensor, outputs: int, inner: int, ids: torch.Tensor, dtype: torch.dtype, layout: Sequence[int]
) -> torch.Tensor:
    tile = PackedTile(*layout)
    out = torch.empty((len(ids), inner), dtype=dtype, device=ids.device)
    column_tiles = inner // tile.columns
    if len(ids):
        _packed_rows[(triton.cdiv(len(ids), _IDS) * column_tiles,)](
            matrix,
            ids,
            out,
            len(ids),
            outputs // ROWS,
            column_tiles,
            TILE=tile,
            IDS=_IDS,
            num_warps=_WARPS,
            num_stages=1,
        )
    return out


@_run.register_fake
def _(
    matrix: torch.Tensor, outputs: int, inner: int, ids: torch.Tensor, dtype: torch.dtype, layout: Sequence[int]
) -> torch.Tensor:
    return torch.empty((len(ids), inner), dtype=dtype, device=ids.device)


def packed_rows(
    blocks: torch.Tensor, stored: StoredFormat, inner: int, ids: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """See `BlockPanels.rows`. Ids must be in range."""
    matrix = packed_matrix(blocks, stored, inner)
    layout = astuple(matrix.tile)
    result: torch.Tensor = _run(matrix.memory, matrix.outputs, inner, ids.contiguous(), dtype, layout)
    return result


def kernel_variants(gpu: GpuTarget) -> Iterator[KernelVariant]:
    """See `attention.decode.kernel_variants`."""
    yield KernelVariant.of(
        "packed_rows Q6_K bf16",
        _packed_rows,
        {"matrix": "i32", "ids": "i64", "out": "bf16"},
        {"count": "i32", "row_tiles": "i32", "column_tiles": "i32"},
        {"TILE": tile_of(GGUF_FORMATS["Q6_K"], 4096), "IDS": _IDS},
        _WARPS,
        1,
    )
