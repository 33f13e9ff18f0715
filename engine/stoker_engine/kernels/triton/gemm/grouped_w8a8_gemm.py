"""Grouped GEMM of 8-bit codes with quantized activations (`w8a8_tile`), in the tiles of `moe.align`.

Tile sizes do not depend on the batch, so a row has the same bits in every batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
import triton
import triton.language as tl

from stoker_engine.kernels.bundle import QuantizedRows
from stoker_engine.kernels.triton.common.arithmetic import rounded, widened
from stoker_engine.kernels.triton.common.gpu_target import GpuTarget
from stoker_engine.kernels.triton.common.kernel_variant import KernelVariant
from stoker_engine.kernels.triton.common.operation import operation
from stoker_engine.kernels.triton.gemm.w8a8_tile import STEP, scaled_product

#: Rows of a tile, if all matrices of the experts are multiplied by this kernel.
TILE_ROWS: Final = 64
#: Outputs of a tile. Like the other tile sizes a guess that was not measured.
_OUTPUTS: Final = 128
_WARPS, _STAGES = 8, 3


@triton.jit(do_not_specialize=["choices"])
def _grouped_w8a8_gemm(  # type: ignore[no-untyped-def]
    x,
    x_scales,
    codes,
    scales,
    biases,
    rows,
    tile_experts,
    out,
    choices,
    code_expert: tl.int64,
    scale_expert: tl.int64,
    bias_expert: tl.int64,
    SHARED: tl.constexpr,
    SIZE: tl.constexpr,
    INNER: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    STEP: tl.constexpr,
):
    tile = tl.program_id(0)
    expert = tl.load(tile_experts + tile).to(tl.int64)
    if expert < 0:
        return
    choice = tl.load(rows + tile * ROWS + tl.arange(0, ROWS))
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    # Outputs and rows beyond the end repeat the last one, and are not stored.
    row = tl.minimum(output, SIZE - 1).to(tl.int64)
    of_x = (tl.minimum(choice, choices - 1) // SHARED).to(tl.int64)
    GROUPS: tl.constexpr = (INNER + GROUP - 1) // GROUP if GROUP else 1
    total = scaled_product(
        codes + expert * code_expert + row * INNER,
        x + of_x * INNER,
        scales + expert * scale_expert + row,
        x_scales + of_x * GROUPS,
        SIZE,
        INNER,
        GROUP,
        STEP,
    )
    if biases is not None:
        total += widened(tl.load(biases + expert * bias_expert + row))[:, None]
    to = out + choice.to(tl.int64)[None, :] * SIZE + output[:, None]
    is_result = (output < SIZE)[:, None] & (choice < choices)[None, :]
    tl.store(to, rounded(total, out.dtype.element_ty), mask=is_result)


@operation("stoker::grouped_w8a8_gemm")
def _run(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    biases: torch.Tensor | None,
    rows: torch.Tensor,
    tile_experts: torch.Tensor,
    shared: int,
    tile_rows: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    _, outputs, inner = codes.shape
    choices = len(x) * shared
    out = torch.empty((choices, outputs), dtype=dtype, device=x.device)
    if not out.numel():
        return out
    _grouped_w8a8_gemm[(len(tile_experts), triton.cdiv(outputs, _OUTPUTS))](
        x,
        x_scales,
        codes,
        scales,
        biases,
        rows,
        tile_experts,
        out,
        choices,
        codes.stride(0),
        scales.stride(0),
        0 if biases is None else biases.stride(0),
        SHARED=shared,
        SIZE=outputs,
        INNER=inner,
        GROUP=STEP if scales.shape[1] > 1 else 0,
        ROWS=tile_rows,
        OUTPUTS=_OUTPUTS,
        STEP=STEP,
        num_warps=_WARPS,
        num_stages=_STAGES,
    )
    return out


@_run.register_fake
def _(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    biases: torch.Tensor | None,
    rows: torch.Tensor,
    tile_experts: torch.Tensor,
    shared: int,
    tile_rows: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    return torch.empty((len(x) * shared, codes.shape[1]), dtype=dtype, device=x.device)


def grouped_w8a8_gemm(
    x: QuantizedRows,
    codes: torch.Tensor,
    scales: torch.Tensor,
    dtype: torch.dtype,
    biases: torch.Tensor | None,
    rows: torch.Tensor,
    tile_experts: torch.Tensor,
    shared: int,
    tile_rows: int,
) -> torch.Tensor:
    """Compute x Wᵀ + b for each choice (a token and its expert).

    Args:
        x: rows [choices / shared, inner], quantized as the matrices are.
        codes, scales: the parts of a stack that is packed (`w8a8_panels.Packed`), with one scale a row, or for groups
            of `STEP` columns.
        dtype: dtype of the results and of biases.
        biases: [experts, outputs], or None.
        rows, tile_experts: results of `align`.
        shared: number of consecutive choices that share a row of x.
        tile_rows: rows of the tiles.

    Returns:
        [choices, outputs]; undefined for choices that are in no tile.
    """
    assert x.values.is_contiguous() and codes[0].is_contiguous() and scales[0].is_contiguous()
    assert biases is None or biases.stride(1) == 1
    result: torch.Tensor = _run(*x, codes, scales, biases, rows, tile_experts, shared, tile_rows, dtype)
    return result


def kernel_variants(gpu: GpuTarget) -> Iterator[KernelVariant]:
    """See `attention.decode.kernel_variants`."""
    for name, code, scale, group, size, inner, shared, has_biases in (
        ("e4m3 in groups, gate up", "fp8e4nv", "fp32", STEP, 4096, 7168, 8, False),
        ("e4m3 in groups, down", "fp8e4nv", "bf16", STEP, 2048, 768, 1, False),
        ("e4m3 in groups, biases, odd size", "fp8e4nv", "fp32", STEP, 5760, 2896, 1, True),
        ("e4m3 in rows, gate up", "fp8e4nv", "fp32", 0, 28672, 4096, 2, False),
        ("int8 in rows, down", "i8", "bf16", 0, 4096, 14336, 1, False),
    ):
        if code == "fp8e4nv" and not gpu.has_fp8:
            continue
        pointers = {"x": code, "x_scales": "fp32", "codes": code, "scales": scale, "out": "bf16"}
        pointers |= {"rows": "i32", "tile_experts": "i32"} | ({"biases": "bf16"} if has_biases else {})
        constants: dict[str, object] = {"SHARED": shared, "SIZE": size, "INNER": inner, "GROUP": group}
        constants |= {"ROWS": TILE_ROWS, "OUTPUTS": _OUTPUTS, "STEP": STEP} | ({} if has_biases else {"biases": None})
        yield KernelVariant.of(
            f"grouped_w8a8_gemm {name}",
            _grouped_w8a8_gemm,
            pointers,
            {"choices": "i32"},
            constants,
            _WARPS,
            _STAGES,
            tensor_cores=True,
        )
