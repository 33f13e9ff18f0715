"""Triton's kernels where a row's bits must not depend on what else is in the batch (``--batch-invariant``).

Most are so by construction. Products with weights are torch's elsewhere, which choose how to sum by how many rows there
are; and those of weights in blocks have tiles that are as wide as there are tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch

from stoker_engine.architectures.stored_formats import StoredFormat
from stoker_engine.kernels.blocks import dequantize
from stoker_engine.kernels.bundle import Operation
from stoker_engine.kernels.triton.bundle import TRITON
from stoker_engine.kernels.triton.gemm import quant_gemm as blocks_of
from stoker_engine.kernels.triton.gemm.batch_invariant_gemm import batched_product, product_of, wide_product
from stoker_engine.kernels.triton.quant.block_tile import has_tiles


def block_product(
    blocks: torch.Tensor, stored: StoredFormat, inner: int, dtype: torch.dtype, bias: torch.Tensor | None = None
) -> Operation:
    """See `Kernels.block_product`."""
    if has_tiles(stored):
        return blocks_of.block_product(blocks, stored, inner, dtype, bias, is_fixed=True)
    return lambda x: product_of(dequantize(blocks, stored, inner, dtype), bias)(x)


BATCH_INVARIANT: Final = replace(
    TRITON,
    product=product_of,
    wide_product=wide_product,
    batched_product=batched_product,
    block_product=block_product,
)
