"""Grouped GEMM with matrices in blocks, which are dequantized tile by tile (see `quant_gemm`).

The tile of weights is the left operand; rows of x are the columns of the right one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
import triton
import triton.language as tl

from stoker_engine.architectures.stored_formats import GGUF_FORMATS, GroupFormat, StoredFormat
from stoker_engine.kernels.triton.common.arithmetic import dot, rounded, widened
from stoker_engine.kernels.triton.common.gpu_target import GpuTarget
from stoker_engine.kernels.triton.common.kernel_variant import KernelVariant
from stoker_engine.kernels.triton.common.operation import operation
from stoker_engine.kernels.triton.gemm.quant_gemm import described, described_tile
from stoker_engine.kernels.triton.quant.block_tile import columns, tile_of, tile_values

#: Chosen so that the kernel does not spill on any target; dequantization needs registers.
_WARPS: Final = 8


def tile_rows_of(dtype: torch.dtype) -> int:
    """Return the number of rows of a tile for x of `dtype`."""
    return 16 if dtype == torch.float32 else 32


def _outputs_of(dtype: torch.dtype) -> int:
    return 32 if dtype == torch.float32 else 64


@triton.jit(do_not_specialize=["choices"])
def _grouped_quant_gemm(  # type: ignore[no-untyped-def]
    x,
    blocks,
    biases,
    rows,
    tile_experts,
    out,
    choices,
    x_row: tl.int64,
    block_expert: tl.int64,
    block_row: tl.int64,
    bias_expert: tl.int64,
    SHARED: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    DTYPE: tl.constexpr = out.dtype.element_ty
    PIECES: tl.constexpr = TILE.pieces
    tile = tl.program_id(0)
    expert = tl.load(tile_experts + tile).to(tl.int64)
    if expert < 0:
        return
    choice = tl.load(rows + tile * ROWS + tl.arange(0, ROWS))
    is_row = choice < choices
    output = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_output = output < OUTPUTS
    of_row = x + (choice // SHARED).to(tl.int64) * x_row
    # Outputs beyond the end repeat the last one, and are not stored.
    of_output = blocks + expert * block_expert + tl.minimum(output, OUTPUTS - 1).to(tl.int64) * block_row
    sums = tl.zeros([COLUMNS, ROWS], tl.float32)
    for first in tl.range(0, TILE.inner, TILE.elements):
        for PIECE in tl.static_range(PIECES):
            column = columns(first, PIECE, TILE)
            is_inner = is_row[None, :] & (column < TILE.inner)[:, None]
            right = tl.load(of_row[None, :] + column[:, None], mask=is_inner, other=0.0)
            sums += dot(rounded(tile_values(of_output, first, PIECE, TILE), DTYPE), right)
    if biases is not None:
        sums += widened(tl.load(biases + expert * bias_expert + output, mask=is_output, other=0.0))[:, None]
    to = out + choice.to(tl.int64)[None, :] * OUTPUTS + output[:, None]
    tl.store(to, rounded(sums, DTYPE), mask=is_output[:, None] & is_row[None, :])


@operation("stoker::grouped_quant_gemm")
def _run(
    x: torch.Tensor,
    blocks: torch.Tensor,
    biases: torch.Tensor | None,
    rows: torch.Tensor,
    tile_experts: torch.Tensor,
    shared: int,
    inner: int,
    code: str,
    group: int,
    scale: str,
    zero: bool,
    row_scale: bool,
) -> torch.Tensor:
    outputs, choices = blocks.shape[1], len(x) * shared
    out = torch.empty((choices, outputs), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    x = x if x.stride(1) == 1 else x.contiguous()
    _grouped_quant_gemm[(len(tile_experts), triton.cdiv(outputs, _outputs_of(x.dtype)))](
        x,
        blocks,
        biases,
        rows,
        tile_experts,
        out,
        choices,
        x.stride(0),
        *blocks.stride()[:2],
        0 if biases is None else biases.stride(0),
        SHARED=shared,
        OUTPUTS=outputs,
        TILE=described_tile(inner, code, group, scale, zero, row_scale),
        ROWS=tile_rows_of(x.dtype),
        COLUMNS=_outputs_of(x.dtype),
        num_warps=_WARPS,
        num_stages=2,
    )
    return out


@_run.register_fake
def _(
    x: torch.Tensor,
    blocks: torch.Tensor,
    biases: torch.Tensor | None,
    rows: torch.Tensor,
    tile_experts: torch.Tensor,
    shared: int,
    inner: int,
    code: str,
    group: int,
    scale: str,
    zero: bool,
    row_scale: bool,
) -> torch.Tensor:
    return torch.empty((len(x) * shared, blocks.shape[1]), dtype=x.dtype, device=x.device)


def grouped_quant_gemm(
    x: torch.Tensor,
    blocks: torch.Tensor,
    stored: StoredFormat,
    inner: int,
    biases: torch.Tensor | None,
    rows: torch.Tensor,
    tile_experts: torch.Tensor,
    shared: int,
) -> torch.Tensor:
    """See `grouped_gemm`; for W in blocks, `kernels.blocks.block_linear`.

    Args:
        blocks: uint8 [experts, outputs, bytes of a row], in a format that has tiles (`block_tile.has_tiles`).
        inner: elements of a row.
        rows, tile_experts: results of `align`, with tiles of `tile_rows_of` rows.
    """
    assert blocks.stride(2) == 1 and (biases is None or biases.stride(1) == 1)
    result: torch.Tensor = _run(x, blocks, biases, rows, tile_experts, shared, inner, *described(stored))
    return result


def kernel_variants(gpu: GpuTarget) -> Iterator[KernelVariant]:
    """See `attention.decode.kernel_variants`."""
    for name, stored, dtype in (
        ("mxfp4", GroupFormat("fp4", 32, "e8m0"), "bf16"),
        ("fp8 in groups", GroupFormat("fp8_e4m3", 128, "float32"), "bf16"),
        ("int4", GroupFormat("uint4", 128, "float16", zero=True), "fp16"),
        ("int8", GroupFormat("int8", 0, "float32"), "bf16"),
        ("Q4_K", GGUF_FORMATS["Q4_K"], "bf16"),
        ("Q6_K", GGUF_FORMATS["Q6_K"], "bf16"),
        ("mxfp4", GroupFormat("fp4", 32, "e8m0"), "fp32"),
    ):
        kind = torch.float32 if dtype == "fp32" else torch.bfloat16
        constants = {
            "SHARED": 4,
            "OUTPUTS": 5760,
            "TILE": tile_of(stored, 4096),
            "ROWS": tile_rows_of(kind),
            "COLUMNS": _outputs_of(kind),
        }
        pointers = dict.fromkeys(("x", "biases", "out"), dtype) | {
            "blocks": "u8",
            "rows": "i32",
            "tile_experts": "i32",
        }
        yield KernelVariant.of(
            f"grouped_quant_gemm {name} {dtype}",
            _grouped_quant_gemm,
            pointers,
            {"choices": "i32"},
            constants,
            _WARPS,
            tensor_cores=dtype != "fp32",
        )
