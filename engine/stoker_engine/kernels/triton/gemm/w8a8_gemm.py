"""GEMM of 8-bit codes with quantized activations (`w8a8_tile`). One program computes a tile of outputs of some tokens.

Tile sizes follow the number of tokens. They do not change the results of int8, whose sums are exact; those of e4m3 may
differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Tiles:
    """Tile sizes (powers of two, at least 16) and compile options.

    Attributes:
        outputs, tokens: size of a tile of results.
        warps, stages: compile options.
    """

    outputs: int
    tokens: int
    warps: int
    stages: int


#: Number of tokens → tiles. Few tokens have narrow tiles, so that a matrix of 4,096 rows occupies most of an H100's 132
#: multiprocessors. Guesses that were not measured.
_FEW: Final = {16: Tiles(32, 16, 4, 5), 32: Tiles(32, 32, 4, 5), 64: Tiles(64, 64, 8, 4)}
#: Tiles of more tokens, as large as the scaled sums of groups fit into registers.
_MANY: Final = Tiles(128, 64, 8, 3)


@triton.jit(do_not_specialize=["tokens"])
def _w8a8_gemm(  # type: ignore[no-untyped-def]
    x,
    x_scales,
    codes,
    scales,
    bias,
    out,
    tokens,
    outputs,
    INNER: tl.constexpr,
    GROUP: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TOKENS: tl.constexpr,
    STEP: tl.constexpr,
):
    # Neighbouring programs share a tile of weights, the larger operand.
    token_tiles = tl.cdiv(tokens, TOKENS)
    output = tl.program_id(0) // token_tiles * OUTPUTS + tl.arange(0, OUTPUTS)
    token = tl.program_id(0) % token_tiles * TOKENS + tl.arange(0, TOKENS)
    # Outputs and tokens beyond the end repeat the last one, and are not stored.
    row, of_x = tl.minimum(output, outputs - 1).to(tl.int64), tl.minimum(token, tokens - 1).to(tl.int64)
    GROUPS: tl.constexpr = (INNER + GROUP - 1) // GROUP if GROUP else 1
    total = scaled_product(
        codes + row * INNER,
        x + of_x * INNER,
        scales + row,
        x_scales + of_x * GROUPS,
        outputs,
        INNER,
        GROUP,
        STEP,
    )
    if bias is not None:
        total += widened(tl.load(bias + row))[:, None]
    at = out + token.to(tl.int64)[None, :] * outputs + output[:, None]
    is_result = (output < outputs)[:, None] & (token < tokens)[None, :]
    tl.store(at, rounded(total, out.dtype.element_ty), mask=is_result)


@operation("stoker::w8a8_gemm")
def _run(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    group: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    tokens, (outputs, inner) = len(x), codes.shape
    out = torch.empty((tokens, outputs), dtype=dtype, device=x.device)
    if not out.numel():
        return out
    tiles = _tiles(tokens)
    _w8a8_gemm[(triton.cdiv(tokens, tiles.tokens) * triton.cdiv(outputs, tiles.outputs),)](
        x,
        x_scales,
        codes,
        scales,
        bias,
        out,
        tokens,
        outputs,
        INNER=inner,
        GROUP=group,
        OUTPUTS=tiles.outputs,
        TOKENS=tiles.tokens,
        STEP=STEP,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return out


@_run.register_fake
def _(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    group: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    return torch.empty((len(x), len(codes)), dtype=dtype, device=x.device)


def w8a8_gemm(
    x: QuantizedRows, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """See `MultiplyW8A8`, for one scale a row, or for groups of `STEP` columns."""
    assert x.values.is_contiguous() and codes.is_contiguous() and scales.is_contiguous()
    result: torch.Tensor = _run(*x, codes, scales, bias, STEP if len(scales) > 1 else 0, dtype)
    return result


def _tiles(tokens: int) -> Tiles:
    """Return the tiles for a number of tokens."""
    return next((tiles for limit, tiles in _FEW.items() if tokens <= limit), _MANY)


def kernel_variants(gpu: GpuTarget) -> Iterator[KernelVariant]:
    """See `attention.decode.kernel_variants`."""
    for tokens in (*_FEW, 1024):
        tiles = _tiles(tokens)
        for name, code, scale, group, inner in (
            ("e4m3 in groups", "fp8e4nv", "fp32", STEP, 7168),
            ("e4m3 in groups, odd size", "fp8e4nv", "bf16", STEP, 1040),
            ("int8", "i8", "bf16", 0, 4096),
        ):
            if code == "fp8e4nv" and not gpu.has_fp8:
                continue
            constants = {"INNER": inner, "GROUP": group, "OUTPUTS": tiles.outputs, "TOKENS": tiles.tokens, "STEP": STEP}
            yield KernelVariant.of(
                f"w8a8_gemm {name}, {tokens} tokens",
                _w8a8_gemm,
                {"x": code, "x_scales": "fp32", "codes": code, "scales": scale, "bias": "bf16", "out": "bf16"},
                {"tokens": "i32", "outputs": "i32"},
                constants,
                tiles.warps,
                tiles.stages,
                tensor_cores=True,
            )
