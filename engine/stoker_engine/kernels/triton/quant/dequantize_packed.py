"""Dequantization of rows of a packed matrix (`packed_layout`) into memory, a tile per program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple

import torch
import triton
import triton.language as tl

from stoker_engine.architectures.stored_formats import GGUF_FORMATS, GroupFormat
from stoker_engine.kernels.triton.common.gpu_target import GpuTarget
from stoker_engine.kernels.triton.common.kernel_variant import KernelVariant
from stoker_engine.kernels.triton.common.operation import operation
from stoker_engine.kernels.triton.quant.packed_layout import ROWS, PackedMatrix, PackedTile, tile_of
from stoker_engine.kernels.triton.quant.packed_tile import tile_weights

_WARPS = 4


@triton.jit(do_not_specialize=["row_tiles", "column_tiles", "first_tile"])
def _dequantize_packed(  # type: ignore[no-untyped-def]
    matrix,
    out,
    row_tiles,
    column_tiles,
    first_tile,
    TILE: tl.constexpr,
):
    DTYPE: tl.constexpr = out.dtype.element_ty
    COLUMNS: tl.constexpr = TILE.columns
    row_tile, column_tile = tl.program_id(0) // column_tiles, tl.program_id(0) % column_tiles
    weights = tile_weights(matrix, first_tile + row_tile, column_tile, row_tiles, column_tiles, TILE, DTYPE)
    row = (row_tile * TILE.rows + tl.arange(0, TILE.rows)).to(tl.int64)
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(out + row[:, None] * (column_tiles * COLUMNS) + column[None, :], weights)


@operation("stoker::dequantize_packed", mutates_args=["out"])
def _run(matrix: torch.Tensor, outputs: int, out: torch.Tensor, first: int, layout: Sequence[int]) -> None:
    tile = PackedTile(*layout)
    column_tiles = out.shape[1] // tile.columns
    _dequantize_packed[(len(out) // ROWS * column_tiles,)](
        matrix,
        out,
        outputs // ROWS,
        column_tiles,
        first // ROWS,
        TILE=tile,
        num_warps=_WARPS,
        num_stages=1,
    )


@_run.register_fake
def _(matrix: torch.Tensor, outputs: int, out: torch.Tensor, first: int, layout: Sequence[int]) -> None:
    return None


def dequantize_packed(matrix: PackedMatrix, first: int, out: torch.Tensor) -> None:
    """Dequantize rows of a packed matrix.

    Args:
        first: the first row, a multiple of 64.
        out: [rows, inner] of the requested dtype, contiguous, with a multiple of 64 rows; is overwritten.
    """
    assert first % ROWS == 0 and len(out) % ROWS == 0 and out.is_contiguous() and out.shape[1] == matrix.inner
    _run(matrix.memory, matrix.outputs, out, first, astuple(matrix.tile))


def kernel_variants(gpu: GpuTarget) -> Iterator[KernelVariant]:
    """See `attention.decode.kernel_variants`."""
    for name, stored, dtype in (
        ("int4", GroupFormat("uint4", 128, "float16"), "bf16"),
        ("int4 with zeros", GroupFormat("uint4", 32, "float16", zero=True), "bf16"),
        ("int8", GroupFormat("int8", 0, "float32"), "bf16"),
        ("int4 with zeros", GroupFormat("uint4", 128, "float16", zero=True), "fp32"),
        ("Q6_K", GGUF_FORMATS["Q6_K"], "bf16"),
    ):
        yield KernelVariant.of(
            f"dequantize_packed {name} {dtype}",
            _dequantize_packed,
            {"matrix": "i32", "out": dtype},
            {"row_tiles": "i32", "column_tiles": "i32", "first_tile": "i32"},
            {"TILE": tile_of(stored, 4096)},
            _WARPS,
            1,
        )
