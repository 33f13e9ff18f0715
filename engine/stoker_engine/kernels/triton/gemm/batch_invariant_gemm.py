"""Batch-invariant GEMM (`kernels/linear.py` and `kernels/batched_linear.py` define the operations): a row has the same
bits in every batch. In torch's GEMMs the order of sums depends on the number of rows.

One program computes a tile (tokens × outputs) of one head, and accumulates over the inner dimension in steps. The
sizes of tiles and steps are fixed.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from stoker_engine.kernels.bundle import Operation
from stoker_engine.kernels.triton.common.arithmetic import dot, rounded, widened
from stoker_engine.kernels.triton.common.gpu_target import GpuTarget
from stoker_engine.kernels.triton.common.kernel_variant import KernelVariant
from stoker_engine.kernels.triton.common.operation import operation
from stoker_engine.kernels.triton.gemm.grouped_gemm import tiles_of


@triton.jit(do_not_specialize=["tokens"])
def _batch_invariant_gemm(  # type: ignore[no-untyped-def]
    x,
    weights,
    bias,
    out,
    tokens,
    x_row: tl.int64,
    x_head: tl.int64,
    weight_head: tl.int64,
    weight_row: tl.int64,
    OUTPUTS: tl.constexpr,
    INNER: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    head = tl.program_id(2).to(tl.int64)
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_token, is_output = token < tokens, output < OUTPUTS
    of_token = x + token.to(tl.int64) * x_row + head * x_head
    of_output = weights + head * weight_head + output.to(tl.int64) * weight_row
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in tl.range(0, INNER, STEP):
        at = begin + tl.arange(0, STEP)
        is_inner = at < INNER
        inputs = tl.load(of_token[:, None] + at[None, :], mask=is_token[:, None] & is_inner[None, :], other=0.0)
        matrix = tl.load(of_output[None, :] + at[:, None], mask=is_output[None, :] & is_inner[:, None], other=0.0)
        sums += dot(inputs, matrix)
    if bias is not None:
        sums += widened(tl.load(bias + output, mask=is_output, other=0.0))[None, :]
    row = token.to(tl.int64) * tl.num_programs(2) + head
    to = out + row[:, None] * OUTPUTS + output[None, :]
    tl.store(to, rounded(sums, out.dtype.element_ty), mask=is_token[:, None] & is_output[None, :])


@operation("stoker::batch_invariant_gemm")
def batch_invariant_gemm(
    x: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None, is_wide: bool
) -> torch.Tensor:
    """Compute x Wᵀ + b for each head, accumulated in float32 and rounded once.

    Args:
        x: [tokens, heads, inner].
        weights: [heads, outputs, inner] of x's dtype.
        bias: [outputs], or None.
        is_wide: whether the result is float32 instead of x's dtype.

    Returns:
        [tokens, heads, outputs].
    """
    (tokens, heads, inner), outputs = x.shape, weights.shape[1]
    out = x.new_empty((tokens, heads, outputs), dtype=torch.float32 if is_wide else x.dtype)
    if not out.numel():
        return out
    assert x.dtype == weights.dtype and weights.stride(2) == 1
    x = x if x.stride(2) == 1 else x.contiguous()
    tiles = tiles_of(x.dtype, torch.version.hip is not None)
    _batch_invariant_gemm[(triton.cdiv(tokens, tiles.rows), triton.cdiv(outputs, tiles.outputs), heads)](
        x,
        weights,
        bias,
        out,
        tokens,
        *x.stride()[:2],
        *weights.stride()[:2],
        OUTPUTS=outputs,
        INNER=inner,
        ROWS=tiles.rows,
        COLUMNS=tiles.outputs,
        STEP=tiles.step,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return out


@batch_invariant_gemm.register_fake
def _(x: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None, is_wide: bool) -> torch.Tensor:
    dtype = torch.float32 if is_wide else x.dtype
    return x.new_empty((len(x), x.shape[1], weights.shape[1]), dtype=dtype)


def linear_of(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Operation:
    """See `Kernels.linear`."""
    return lambda x: _rows(x, weight, bias, is_wide=False)


def float32_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Operation:
    """See `Kernels.float32_linear`."""

    def multiply(x: torch.Tensor) -> torch.Tensor:
        if x.dtype == weight.dtype:
            return _rows(x, weight, bias, is_wide=True)
        return _rows(x.float(), weight.float(), bias, is_wide=True)

    return multiply


def batched_linear(weight: torch.Tensor) -> Operation:
    """See `Kernels.batched_linear`."""
    return lambda x: batch_invariant_gemm(x, weight, None, False)


def _rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, is_wide: bool) -> torch.Tensor:
    rows = x.reshape(-1, 1, x.shape[-1])
    result: torch.Tensor = batch_invariant_gemm(rows, weight.unsqueeze(0), bias, is_wide)
    return result.view(*x.shape[:-1], len(weight))


def kernel_variants(gpu: GpuTarget) -> Iterator[KernelVariant]:
    """See `attention.decode.kernel_variants`."""
    for name, dtype, out, outputs, inner in (
        ("", "bf16", "bf16", 14336, 4096),
        ("odd sizes", "bf16", "bf16", 2880, 2881),
        ("wide", "bf16", "fp32", 256, 7168),
        ("", "fp16", "fp16", 128256, 4096),
        ("", "fp32", "fp32", 4096, 4096),
    ):
        tiles = tiles_of(torch.float32 if dtype == "fp32" else torch.bfloat16, gpu.is_amd)
        constants = {
            "OUTPUTS": outputs,
            "INNER": inner,
            "ROWS": tiles.rows,
            "COLUMNS": tiles.outputs,
            "STEP": tiles.step,
        }
        yield KernelVariant.of(
            " ".join(filter(None, ("batch_invariant_gemm", name, dtype))),
            _batch_invariant_gemm,
            {"x": dtype, "weights": dtype, "bias": dtype, "out": out},
            {"tokens": "i32"},
            constants,
            tiles.warps,
            tiles.stages,
            tensor_cores=dtype != "fp32",
        )
