"""Grouped GEMM with a stack of packed matrices (`packed_layout`), which are dequantized tile by tile (see
`packed_quant_gemm`).

The inner dimension is not split: a token's experts have enough tiles of outputs for all multiprocessors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple
from typing import Final

import torch
import triton
import triton.language as tl

from stoker_engine.architectures.stored_formats import GGUF_FORMATS, GroupFormat, StoredFormat
from stoker_engine.kernels.triton.common.arithmetic import dot, rounded, widened
from stoker_engine.kernels.triton.common.gpu_target import GpuTarget, gpu_target_of
from stoker_engine.kernels.triton.common.kernel_variant import KernelVariant
from stoker_engine.kernels.triton.common.operation import operation
from stoker_engine.kernels.triton.gemm.grouped_quant_gemm import tile_rows_of
from stoker_engine.kernels.triton.gemm.packed_quant_gemm import stages_of
from stoker_engine.kernels.triton.quant.packed_layout import ROWS, PackedMatrix, PackedTile, tile_of
from stoker_engine.kernels.triton.quant.packed_tile import tile_weights

#: The order of words in a tile is that of four warps.
_WARPS: Final = 4


@triton.jit(do_not_specialize=["choices", "row_tiles", "column_tiles"])
def _grouped_packed_gemm(  # type: ignore[no-untyped-def]
    x,
    matrices,
    biases,
    rows,
    tile_experts,
    out,
    choices,
    row_tiles,
    column_tiles,
    x_row: tl.int64,
    matrix_words: tl.int64,
    bias_expert: tl.int64,
    SHARED: tl.constexpr,
    TILE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    DTYPE: tl.constexpr = x.dtype.element_ty
    COLUMNS: tl.constexpr = TILE.columns
    tile, row_tile = tl.program_id(0), tl.program_id(1)
    expert = tl.load(tile_experts + tile).to(tl.int64)
    if expert < 0:
        return
    choice = tl.load(rows + tile * TOKENS + tl.arange(0, TOKENS))
    is_choice = choice < choices
    from_x = x + (choice // SHARED).to(tl.int64) * x_row
    matrix = matrices + expert * matrix_words
    output = row_tile * TILE.rows + tl.arange(0, TILE.rows)
    sums = tl.zeros([TILE.rows, TOKENS], tl.float32)
    for column_tile in tl.range(0, column_tiles):
        column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
        right = tl.load(from_x[None, :] + column[:, None], mask=is_choice[None, :], other=0.0)
        sums += dot(tile_weights(matrix, row_tile, column_tile, row_tiles, column_tiles, TILE, DTYPE), right)
    if biases is not None:
        sums += widened(tl.load(biases + expert * bias_expert + output))[:, None]
    to = out + choice.to(tl.int64)[None, :] * (row_tiles * TILE.rows) + output[:, None]
    tl.store(to, rounded(sums, DTYPE), mask=is_choice[None, :])


@operation("stoker::grouped_packed_gemm")
def _run(
    x: torch.Tensor,
    matrices: torch.Tensor,
    outputs: int,
    biases: torch.Tensor | None,
    rows: torch.Tensor,
    tile_experts: torch.Tensor,
    shared: int,
    layout: Sequence[int],
) -> torch.Tensor:
    tile, choices, tokens = PackedTile(*layout), len(x) * shared, tile_rows_of(x.dtype)
    out = torch.empty((choices, outputs), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    x = x if x.stride(1) == 1 else x.contiguous()
    _grouped_packed_gemm[(len(tile_experts), outputs // ROWS)](
        x,
        matrices,
        biases,
        rows,
        tile_experts,
        out,
        choices,
        outputs // ROWS,
        x.shape[1] // tile.columns,
        x.stride(0),
        matrices.stride(0),
        0 if biases is None else biases.stride(0),
        SHARED=shared,
        TILE=tile,
        TOKENS=tokens,
        num_warps=_WARPS,
        num_stages=stages_of(tokens, x.dtype, gpu_target_of(x.device)),
    )
    return out


@_run.register_fake
def _(
    x: torch.Tensor,
    matrices: torch.Tensor,
    outputs: int,
    biases: torch.Tensor | None,
    rows: torch.Tensor,
    tile_experts: torch.Tensor,
    shared: int,
    layout: Sequence[int],
) -> torch.Tensor:
    return torch.empty((len(x) * shared, outputs), dtype=x.dtype, device=x.device)


def grouped_packed_gemm(
    x: torch.Tensor,
    matrices: PackedMatrix,
    biases: torch.Tensor | None,
    rows: torch.Tensor,
    tile_experts: torch.Tensor,
    shared: int,
) -> torch.Tensor:
    """See `grouped_gemm`; each W is dequantized to x's dtype.

    Args:
        matrices: a stack of matrices.
        rows, tile_experts: results of `align`, with tiles of `tile_rows_of` rows.
    """
    assert x.shape[1] == matrices.inner and (biases is None or biases.stride(1) == 1)
    where = rows, tile_experts, shared
    result: torch.Tensor = _run(x, matrices.memory, matrices.outputs, biases, *where, astuple(matrices.tile))
    return result


def kernel_variants(gpu: GpuTarget) -> Iterator[KernelVariant]:
    """See `attention.decode.kernel_variants`."""
    variants: tuple[tuple[str, StoredFormat, int, str], ...] = (
        ("int4", GroupFormat("uint4", 128, "float16", zero=True), 4096, "bf16"),
        ("mxfp4", GroupFormat("fp4", 32, "e8m0"), 2880, "bf16"),
        ("mxfp4", GroupFormat("fp4", 32, "e8m0"), 2880, "fp32"),
        ("Q6_K", GGUF_FORMATS["Q6_K"], 4096, "bf16"),
    )
    for name, stored, inner, dtype in variants:
        kind = torch.float32 if dtype == "fp32" else torch.bfloat16
        tokens = tile_rows_of(kind)
        yield KernelVariant.of(
            f"grouped_packed_gemm {name} {dtype}",
            _grouped_packed_gemm,
            dict.fromkeys(("x", "biases", "out"), dtype) | dict.fromkeys(("matrices", "rows", "tile_experts"), "i32"),
            {"choices": "i32", "row_tiles": "i32", "column_tiles": "i32"},
            {"SHARED": 4, "TILE": tile_of(stored, inner), "TOKENS": tokens},
            _WARPS,
            stages_of(tokens, kind, gpu),
            tensor_cores=dtype != "fp32",
        )
