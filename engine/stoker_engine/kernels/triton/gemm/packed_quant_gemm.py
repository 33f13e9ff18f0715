"""GEMM with a packed matrix (`packed_layout`) for few rows of x: split-K (Hoque et al., 2024, arXiv 2402.00025).

Few rows read the matrix once and compute little, so memory has to be busy: a program loads whole tiles of words ahead
(`num_stages`), and the inner dimension is split among so many programs that each multiprocessor has several. The parts
are float32, and are summed in order (`sum_parts`), so no result depends on which program ends first.

The tile of weights is the left operand, in the registers into which it was unpacked; tokens are the columns of the
right one. Other tokens' values change no bit of a token's results. The number of parts and the tiles' width follow the
number of tokens. If `is_fixed`, they do not: with many tokens a program then computes all parts of its tile one after
the other, and sums them in the same order.
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
from stoker_engine.kernels.triton.gemm.sum_parts import sum_parts
from stoker_engine.kernels.triton.quant.packed_layout import ROWS, PackedMatrix, PackedTile, tile_of
from stoker_engine.kernels.triton.quant.packed_tile import tile_weights

#: The order of words in a tile is that of four warps.
_WARPS: Final = 4
#: Number of programs that parts may make: 4 or, with wide tiles, 2 for each multiprocessor of an H100. Guesses that
#: were not measured.
_PROGRAMS: Final = {16: 528, 32: 528, 64: 264}
#: Smallest number of tiles of a part, so that the loads of a program's first tiles are worth waiting for.
_LEAST_TILES: Final = 4
#: Width of tiles that must not depend on the number of tokens: wider tiles make prompts faster, and decodes slower.
_FIXED_WIDTH: Final = 32
#: Largest number of tokens whose parts are summed by another kernel if `is_fixed`.
_SPLIT_TOKENS: Final = 128


@triton.jit(do_not_specialize=["tokens", "row_tiles", "column_tiles", "parts"])
def _packed_quant_gemm(  # type: ignore[no-untyped-def]
    x,
    matrix,
    bias,
    out,
    tokens,
    row_tiles,
    column_tiles,
    parts,
    x_row: tl.int64,
    TILE: tl.constexpr,
    TOKENS: tl.constexpr,
    IS_SERIAL: tl.constexpr,
):
    # Neighbouring programs share the words, the larger operand.
    token_tiles = tl.cdiv(tokens, TOKENS)
    row_tile, token_tile = tl.program_id(0) // token_tiles, tl.program_id(0) % token_tiles
    token = token_tile * TOKENS + tl.arange(0, TOKENS)
    is_token = token < tokens
    from_x = x + token.to(tl.int64) * x_row
    output = row_tile * TILE.rows + tl.arange(0, TILE.rows)
    part = tl.program_id(1)
    if IS_SERIAL:
        total = tl.zeros([TILE.rows, TOKENS], tl.float32)
        for each in tl.range(0, parts):
            total += _part(from_x, is_token, matrix, row_tile, row_tiles, column_tiles, each, parts, TILE, TOKENS)
    else:
        total = _part(from_x, is_token, matrix, row_tile, row_tiles, column_tiles, part, parts, TILE, TOKENS)
    if bias is not None:
        total += widened(tl.load(bias + output))[:, None]
    at = (part.to(tl.int64) * tokens + token) * (row_tiles * TILE.rows)
    result = rounded(total, out.dtype.element_ty)
    tl.store(out + at[None, :] + output[:, None], result, mask=is_token[None, :])


@triton.jit
def _part(  # type: ignore[no-untyped-def]
    from_x,
    is_token,
    matrix,
    row_tile,
    row_tiles,
    column_tiles,
    part,
    parts,
    TILE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Return the product over one part of the inner dimension, float32 [rows, TOKENS]."""
    DTYPE: tl.constexpr = from_x.dtype.element_ty
    COLUMNS: tl.constexpr = TILE.columns
    total = tl.zeros([TILE.rows, TOKENS], tl.float32)
    for column_tile in tl.range(part * column_tiles // parts, (part + 1) * column_tiles // parts):
        column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
        right = tl.load(from_x[None, :] + column[:, None], mask=is_token[None, :], other=0.0)
        weights = tile_weights(matrix, row_tile, column_tile, row_tiles, column_tiles, TILE, DTYPE)
        total += dot(weights, right)
    return total


@operation("stoker::packed_quant_gemm")
def _run(
    x: torch.Tensor,
    matrix: torch.Tensor,
    outputs: int,
    bias: torch.Tensor | None,
    layout: Sequence[int],
    is_fixed: bool,
) -> torch.Tensor:
    tile, (tokens, inner) = PackedTile(*layout), x.shape
    row_tiles, column_tiles = outputs // ROWS, inner // tile.columns
    if not tokens:
        return x.new_empty(0, outputs)
    width = _width(None if is_fixed else tokens, x.dtype)
    parts = _parts(row_tiles, column_tiles, width)
    is_serial = is_fixed and tokens > _SPLIT_TOKENS
    is_split = parts > 1 and not is_serial
    shape = (parts, tokens, outputs) if is_split else (tokens, outputs)
    out = x.new_empty(shape, dtype=torch.float32 if is_split else x.dtype)
    _packed_quant_gemm[(row_tiles * triton.cdiv(tokens, width), parts if is_split else 1)](
        x,
        matrix,
        None if is_split else bias,
        out,
        tokens,
        row_tiles,
        column_tiles,
        parts,
        x.stride(0),
        TILE=tile,
        TOKENS=width,
        IS_SERIAL=is_serial,
        num_warps=_WARPS,
        num_stages=stages_of(width, x.dtype, gpu_target_of(x.device)),
    )
    return sum_parts(out, bias, x.dtype) if is_split else out


@_run.register_fake
def _(
    x: torch.Tensor,
    matrix: torch.Tensor,
    outputs: int,
    bias: torch.Tensor | None,
    layout: Sequence[int],
    is_fixed: bool,
) -> torch.Tensor:
    return x.new_empty((len(x), outputs))


def packed_quant_gemm(x: torch.Tensor, matrix: PackedMatrix, bias: torch.Tensor | None, is_fixed: bool) -> torch.Tensor:
    """Compute x Wᵀ + b for a packed W, dequantized to x's dtype.

    Args:
        x: [tokens, inner], contiguous within rows.
        bias: [outputs] in x's dtype, or None.
        is_fixed: whether a row's bits must not depend on the number of tokens.

    Returns:
        [tokens, outputs].
    """
    assert x.shape[1] == matrix.inner and x.stride(1) == 1
    layout = astuple(matrix.tile)
    result: torch.Tensor = _run(x, matrix.memory, matrix.outputs, bias, layout, is_fixed)
    return result


def _width(tokens: int | None, dtype: torch.dtype) -> int:
    """Return the width of tiles in tokens; `tokens` is None if it must not depend on their number."""
    if dtype == torch.float32:
        return 16
    if tokens is None:
        return _FIXED_WIDTH
    return next(width for width in (16, 32, 64) if width == 64 or tokens <= width)


def _parts(row_tiles: int, column_tiles: int, width: int) -> int:
    """Return the number of parts of the inner dimension: as many as make no more programs than `_PROGRAMS`."""
    return max(1, min(_PROGRAMS[width] // row_tiles, column_tiles // _LEAST_TILES))


def stages_of(width: int, dtype: torch.dtype, gpu: GpuTarget) -> int:
    """Return the number of stages. Each takes shared memory for a tile of words and a tile of x."""
    if dtype == torch.float32:
        return 2
    return (4 if width < 64 else 3) - (not gpu.has_room)


def kernel_variants(gpu: GpuTarget) -> Iterator[KernelVariant]:
    """See `attention.decode.kernel_variants`."""
    symmetric = GroupFormat("uint4", 128, "float16")
    zeros = GroupFormat("uint4", 32, "float16", zero=True)
    variants: tuple[tuple[str, StoredFormat, str, int, bool, bool], ...] = (
        ("int4", symmetric, "bf16", 16, True, False),
        ("int4", symmetric, "fp16", 64, False, False),
        ("int4 with zeros", zeros, "bf16", 16, True, False),
        ("int4 with zeros", zeros, "bf16", 16, False, False),
        ("int4 with zeros", zeros, "bf16", 32, True, False),
        ("int4 with zeros", zeros, "bf16", 32, False, True),
        ("int4 with zeros", zeros, "bf16", 64, True, False),
        ("int4 with zeros", zeros, "fp32", 16, False, True),
        ("int8", GroupFormat("int8", 32, "float16"), "bf16", 16, True, False),
        ("int8", GroupFormat("int8", 0, "float32"), "bf16", 64, False, False),
        ("mxfp4", GroupFormat("fp4", 32, "e8m0"), "bf16", 16, True, False),
        ("nvfp4", GroupFormat("fp4", 16, "fp8_e4m3", row_scale=True), "bf16", 16, True, False),
        ("Q4_K", GGUF_FORMATS["Q4_K"], "bf16", 16, True, False),
        ("Q5_K", GGUF_FORMATS["Q5_K"], "bf16", 16, True, False),
        ("Q6_K", GGUF_FORMATS["Q6_K"], "bf16", 64, False, False),
    )
    for name, stored, dtype, width, is_split, is_serial in variants:
        kind = torch.float32 if dtype == "fp32" else torch.bfloat16
        yield KernelVariant.of(
            f"packed_quant_gemm {name}, {width} tokens {dtype}{' split' * is_split}{' in order' * is_serial}",
            _packed_quant_gemm,
            {"x": dtype, "matrix": "i32", "bias": dtype, "out": "fp32" if is_split else dtype},
            {"tokens": "i32", "row_tiles": "i32", "column_tiles": "i32", "parts": "i32"},
            {"TILE": tile_of(stored, 4096), "TOKENS": width, "IS_SERIAL": is_serial}
            | ({"bias": None} if is_split else {}),
            _WARPS,
            stages_of(width, kind, gpu),
            tensor_cores=dtype != "fp32",
        )
