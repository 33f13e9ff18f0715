"""Grouped GEMM: multiplies rows with the matrix of their expert, in the tiles of `moe.align`.

One program computes a tile (rows × outputs), and accumulates over the inner dimension in steps of a fixed size. Tile
sizes do not depend on the batch, so a row has the same bits in every batch. Neighbouring programs of one expert share
weights. Programs of unused tiles return immediately.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from stoker_engine.kernels.triton.common.arithmetic import dot, rounded, widened
from stoker_engine.kernels.triton.common.gpu_target import GpuTarget
from stoker_engine.kernels.triton.common.kernel_variant import KernelVariant
from stoker_engine.kernels.triton.common.operation import operation


@dataclass(frozen=True)
class Tiles:
    """Tile sizes (powers of two, at least 16) and compile options.

    Attributes:
        rows, outputs: size of a tile of results.
        step: number of inner elements that are multiplied at once.
        warps, stages: compile options.
    """

    rows: int
    outputs: int
    step: int
    warps: int
    stages: int


def tiles_of(dtype: torch.dtype, is_amd: bool) -> Tiles:
    """Return the tile sizes for matrices of `dtype`.

    Hopper's tensor cores process 64 rows at once; decodes have fewer rows, but are bound by the bandwidth of weights.
    """
    if dtype == torch.float32:  # without tensor cores, which would lose precision
        return Tiles(16, 32, 32, warps=4, stages=2)
    return Tiles(64, 128, 64, warps=4, stages=2 if is_amd else 3)


@triton.jit(do_not_specialize=["choices"])
def _grouped_gemm(  # type: ignore[no-untyped-def]
    x,
    weights,
    biases,
    rows,
    tile_experts,
    out,
    choices,
    x_row: tl.int64,
    weight_expert: tl.int64,
    weight_row: tl.int64,
    bias_expert: tl.int64,
    SHARED: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INNER: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    tile = tl.program_id(0)
    expert = tl.load(tile_experts + tile).to(tl.int64)
    if expert < 0:
        return
    choice = tl.load(rows + tile * ROWS + tl.arange(0, ROWS))
    is_row = choice < choices
    output = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_output = output < OUTPUTS
    of_row = x + (choice // SHARED).to(tl.int64) * x_row
    of_output = weights + expert * weight_expert + output.to(tl.int64) * weight_row
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in tl.range(0, INNER, STEP):
        at = begin + tl.arange(0, STEP)
        is_inner = at < INNER
        inputs = tl.load(of_row[:, None] + at[None, :], mask=is_row[:, None] & is_inner[None, :], other=0.0)
        matrix = tl.load(of_output[None, :] + at[:, None], mask=is_output[None, :] & is_inner[:, None], other=0.0)
        sums += dot(inputs, matrix)
    if biases is not None:
        sums += widened(tl.load(biases + expert * bias_expert + output, mask=is_output, other=0.0))[None, :]
    to = out + choice.to(tl.int64)[:, None] * OUTPUTS + output[None, :]
    tl.store(to, rounded(sums, out.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


@operation("stoker::grouped_gemm")
def grouped_gemm(
    x: torch.Tensor,
    weights: torch.Tensor,
    biases: torch.Tensor | None,
    rows: torch.Tensor,
    tile_experts: torch.Tensor,
    shared: int,
) -> torch.Tensor:
    """Compute x Wᵀ + b for each choice (a token and its expert), accumulated in float32.

    Args:
        x: [choices / shared, inner].
        weights: [experts, outputs, inner] of x's dtype.
        biases: [experts, outputs] of x's dtype, or None.
        rows, tile_experts: results of `align`, with tiles of `tiles_of(...).rows` rows.
        shared: number of consecutive choices that share a row of x.

    Returns:
        [choices, outputs] of x's dtype; undefined for choices that are in no tile.
    """
    _, outputs, inner = weights.shape
    choices = len(x) * shared
    out = torch.empty((choices, outputs), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    x = x if x.stride(1) == 1 else x.contiguous()
    assert weights.stride(2) == 1 and (biases is None or biases.stride(1) == 1)
    tiles = tiles_of(x.dtype, torch.version.hip is not None)
    _grouped_gemm[(len(tile_experts), triton.cdiv(outputs, tiles.outputs))](
        x,
        weights,
        biases,
        rows,
        tile_experts,
        out,
        choices,
        x.stride(0),
        *weights.stride()[:2],
        0 if biases is None else biases.stride(0),
        SHARED=shared,
        OUTPUTS=outputs,
        INNER=inner,
        ROWS=tiles.rows,
        COLUMNS=tiles.outputs,
        STEP=tiles.step,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return out


@grouped_gemm.register_fake
def _(
    x: torch.Tensor,
    weights: torch.Tensor,
    biases: torch.Tensor | None,
    rows: torch.Tensor,
    tile_experts: torch.Tensor,
    shared: int,
) -> torch.Tensor:
    return torch.empty((len(x) * shared, weights.shape[1]), dtype=x.dtype, device=x.device)


def kernel_variants(gpu: GpuTarget) -> Iterator[KernelVariant]:
    """See `attention.decode.kernel_variants`."""
    for name, dtype, outputs, inner, shared, has_biases in (
        ("gate up", "bf16", 28672, 4096, 2, False),
        ("down", "bf16", 4096, 14336, 1, False),
        ("gate up, biases, odd sizes", "bf16", 5760, 2880, 4, True),
        ("down", "fp16", 7168, 2048, 1, False),
        ("gate up, biases", "fp32", 5760, 2880, 4, True),
    ):
        tiles = tiles_of(torch.float32 if dtype == "fp32" else torch.bfloat16, gpu.is_amd)
        constants = {
            "SHARED": shared,
            "OUTPUTS": outputs,
            "INNER": inner,
            "ROWS": tiles.rows,
            "COLUMNS": tiles.outputs,
            "STEP": tiles.step,
        }
        pointers = dict.fromkeys(("x", "weights", "out"), dtype) | {"rows": "i32", "tile_experts": "i32"}
        if has_biases:
            pointers["biases"] = dtype
        yield KernelVariant.of(
            f"grouped_gemm {name} {dtype}",
            _grouped_gemm,
            pointers,
            {"choices": "i32"},
            constants | ({} if has_biases else {"biases": None}),
            tiles.warps,
            tiles.stages,
            tensor_cores=dtype != "fp32",
        )
