"""GEMM with a matrix in blocks (`kernels/blocks.py` defines it). One program computes a tile of outputs of some tokens.

Tiles of weights are dequantized to x's dtype on the way to the tensor cores, so only the blocks are read from memory.
The tile of weights is the left operand, and tokens are the columns of the right one, which wastes little for few
tokens.

Of the tile sizes, only the width (tokens) may depend on the batch. Each output is accumulated in the order of the row's
tiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Final, cast

import torch
import triton
import triton.language as tl

from stoker_engine.architectures.stored_formats import (
    GGUF_FORMATS,
    Q8_0,
    Code,
    GGUFFormat,
    GroupFormat,
    Scale,
    StoredFormat,
)
from stoker_engine.kernels.bundle import Operation
from stoker_engine.kernels.reference import REFERENCE
from stoker_engine.kernels.triton.common.arithmetic import dot, rounded, widened
from stoker_engine.kernels.triton.common.gpu_target import GpuTarget
from stoker_engine.kernels.triton.common.kernel_variant import KernelVariant
from stoker_engine.kernels.triton.common.operation import operation
from stoker_engine.kernels.triton.quant.block_tile import Tile, columns, has_tiles, tile_of, tile_values
from stoker_engine.kernels.triton.quant.gguf_tile import TYPES
from stoker_engine.kernels.triton.quant.group_tile import CODES

_OUTPUTS: Final = 64
_DTYPES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@triton.jit(do_not_specialize=["tokens"])
def _quant_gemm(  # type: ignore[no-untyped-def]
    x,
    blocks,
    bias,
    out,
    tokens,
    outputs,
    x_row: tl.int64,
    block_row: tl.int64,
    TILE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    DTYPE: tl.constexpr = out.dtype.element_ty
    PIECES: tl.constexpr = TILE.pieces
    # Neighbouring programs share a tile of weights, the larger operand.
    parts = tl.cdiv(tokens, TOKENS)
    output = tl.program_id(0) // parts * OUTPUTS + tl.arange(0, OUTPUTS)
    token = tl.program_id(0) % parts * TOKENS + tl.arange(0, TOKENS)
    # Outputs beyond the end repeat the last one, and are not stored.
    rows = blocks + tl.minimum(output, outputs - 1).to(tl.int64) * block_row
    from_x = x + tl.minimum(token, tokens - 1).to(tl.int64) * x_row
    total = tl.zeros([OUTPUTS, TOKENS], tl.float32)
    for first in tl.range(0, TILE.inner, TILE.elements):
        for PIECE in tl.static_range(PIECES):
            column = columns(first, PIECE, TILE)[:, None]
            if TILE.inner % TILE.elements:
                right = tl.load(from_x[None, :] + column, mask=column < TILE.inner, other=0.0)
            else:
                right = tl.load(from_x[None, :] + column)
            total += dot(rounded(tile_values(rows, first, PIECE, TILE), DTYPE), right)
    is_output = output < outputs
    if bias is not None:
        total += widened(tl.load(bias + output, mask=is_output, other=0.0))[:, None]
    at = out + token.to(tl.int64)[None, :] * outputs + output[:, None]
    tl.store(at, rounded(total, DTYPE), mask=is_output[:, None] & (token < tokens)[None, :])


@operation("stoker::quant_linear")
def _run(
    x: torch.Tensor,
    blocks: torch.Tensor,
    bias: torch.Tensor | None,
    inner: int,
    code: str,
    group: int,
    scale: str,
    zero: bool,
    row_scale: bool,
    is_fixed: bool,
) -> torch.Tensor:
    outputs = len(blocks)
    out = torch.empty((*x.shape[:-1], outputs), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    rows = x if x.dim() == 2 and x.stride(1) == 1 else x.contiguous().view(-1, inner)
    tile = described_tile(inner, code, group, scale, zero, row_scale)
    width = _width(None if is_fixed else len(rows), tile, x.dtype)
    _quant_gemm[(triton.cdiv(len(rows), width) * triton.cdiv(outputs, _OUTPUTS),)](
        rows,
        blocks,
        bias,
        out,
        len(rows),
        outputs,
        rows.stride(0),
        blocks.stride(0),
        TILE=tile,
        OUTPUTS=_OUTPUTS,
        TOKENS=width,
        num_warps=_warps(tile),
        num_stages=2,
    )
    return out


@_run.register_fake
def _(
    x: torch.Tensor,
    blocks: torch.Tensor,
    bias: torch.Tensor | None,
    inner: int,
    code: str,
    group: int,
    scale: str,
    zero: bool,
    row_scale: bool,
    is_fixed: bool,
) -> torch.Tensor:
    return torch.empty((*x.shape[:-1], len(blocks)), dtype=x.dtype, device=x.device)


def quant_linear(
    blocks: torch.Tensor,
    stored: StoredFormat,
    inner: int,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    is_fixed: bool = False,
) -> Operation:
    """See `Kernels.quant_linear`. `blocks` may be strided by rows. GGUF's F16 and BF16 use the reference.

    Args:
        is_fixed: whether the width of tiles must not depend on the number of tokens.
    """
    if not has_tiles(stored):
        return REFERENCE.quant_linear(blocks, stored, inner, dtype, bias)
    assert blocks.stride(1) == 1 and blocks.shape[1] == stored.row_bytes(inner)
    parts = described(stored)
    return lambda x: _run(x, blocks, bias, inner, *parts, is_fixed)


def described(stored: StoredFormat) -> tuple[str, int, str, bool, bool]:
    """Describe a format by types that torch operators accept as arguments."""
    if isinstance(stored, GGUFFormat):
        return stored.name, stored.numbers, "", False, False
    return stored.code, stored.group, stored.scale, stored.zero, stored.row_scale


@cache
def described_tile(inner: int, code: str, group: int, scale: str, zero: bool, row_scale: bool) -> Tile:
    """Return the layout of tiles for a format described by `described`."""
    if code in GGUF_FORMATS:
        return tile_of(GGUF_FORMATS[code], inner)
    return tile_of(GroupFormat(cast(Code, code), group, cast(Scale, scale), zero, row_scale), inner)


def _width(tokens: int | None, tile: Tile, dtype: torch.dtype) -> int:
    """Return the width of tiles in tokens; `tokens` is None if it must not depend on their number.

    Wider tiles would spill: dequantization needs registers, most of all for GGUF's types and nf4.
    """
    is_costly = tile.is_gguf or _is_nf4(tile)
    max_width = 16 if dtype == torch.float32 else 32 if is_costly else 64
    return next(width for width in (16, 32, 64) if width == max_width or (tokens is not None and tokens <= width))


def _warps(tile: Tile) -> int:
    """Return the number of warps with which the kernel does not spill."""
    return 4 if (tile.is_gguf and tile.code == TYPES["Q2_K"].code) or _is_nf4(tile) else 8


def _is_nf4(tile: Tile) -> bool:
    return not tile.is_gguf and tile.code == CODES["nf4"]


#: Formats of common models: GPTQ, AWQ, DeepSeek, LLM.int8(), OpenAI, NVIDIA, QLoRA, GGUF.
_MODELS: Final[tuple[StoredFormat, ...]] = (
    GroupFormat("uint4", 128, "float16"),
    GroupFormat("uint4", 128, "float16", zero=True),
    GroupFormat("uint4", 64, "float16", zero=True),
    GroupFormat("uint4", 32, "float16", zero=True),
    GroupFormat("uint3", 128, "float16", zero=True),
    GroupFormat("uint2", 64, "float16", zero=True),
    GroupFormat("int8", 0, "float32"),
    GroupFormat("int8", 32, "float16"),
    GroupFormat("fp8_e4m3", 128, "float32"),
    GroupFormat("fp8_e4m3", 0, "float32"),
    GroupFormat("fp4", 32, "e8m0"),
    GroupFormat("fp4", 16, "fp8_e4m3", row_scale=True),
    GroupFormat("nf4", 64, "float32"),
    *(GGUF_FORMATS[name] for name in TYPES),
)


def kernel_variants(gpu: GpuTarget) -> Iterator[KernelVariant]:
    """See `attention.decode.kernel_variants`."""
    for stored in _MODELS:
        tile = tile_of(stored, 4096)
        for name, dtype in _DTYPES.items() if stored in (_MODELS[0], Q8_0) else [("bf16", torch.bfloat16)]:
            counts = (1, 1024) if stored in (_MODELS[0], Q8_0) else (1024,)
            for tokens in sorted({_width(count, tile, dtype) for count in counts}):
                yield KernelVariant.of(
                    f"quant_linear {_label(stored)}, {tokens} tokens {name}",
                    _quant_gemm,
                    {"x": name, "blocks": "u8", "bias": name, "out": name},
                    {"tokens": "i32", "outputs": "i32"},
                    {"TILE": tile, "OUTPUTS": _OUTPUTS, "TOKENS": tokens},
                    _warps(tile),
                    tensor_cores=dtype != torch.float32,
                )


def _label(stored: StoredFormat) -> str:
    if isinstance(stored, GGUFFormat):
        return stored.name
    return f"{stored.name}{' with zeros' * stored.zero}"
