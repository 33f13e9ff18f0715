"""Bundle of batch-invariant Triton kernels: a row's bits do not depend on its batch (``--batch-invariant``).

Most Triton kernels are batch-invariant by construction. Only linear operations are replaced: torch's order of sums
depends on the number of rows, and the tiles of the kernels for weights in blocks on the number of tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch

from stoker_engine.architectures.stored_formats import StoredFormat
from stoker_engine.kernels.blocks import dequantize
from stoker_engine.kernels.bundle import Operation
from stoker_engine.kernels.triton.bundle import INT8, TRITON, panels
from stoker_engine.kernels.triton.gemm import quant_gemm as blocks_of
from stoker_engine.kernels.triton.gemm.batch_invariant_gemm import batched_linear, float32_linear, linear_of
from stoker_engine.kernels.triton.moe.experts import block_experts_with
from stoker_engine.kernels.triton.quant.block_tile import has_tiles


def quant_linear(
    blocks: torch.Tensor, stored: StoredFormat, inner: int, dtype: torch.dtype, bias: torch.Tensor | None = None
) -> Operation:
    """See `Kernels.quant_linear`."""
    if has_tiles(stored):
        return blocks_of.quant_linear(blocks, stored, inner, dtype, bias, is_fixed=True)
    return lambda x: linear_of(dequantize(blocks, stored, inner, dtype), bias)(x)


BATCH_INVARIANT: Final = replace(
    TRITON,
    linear=linear_of,
    float32_linear=float32_linear,
    batched_linear=batched_linear,
    quant_linear=quant_linear,
    block_experts=block_experts_with(quant_linear),
    block_panels=panels(INT8, is_fixed=True),
)
