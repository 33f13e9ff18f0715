"""Linear operations with packed matrices (`quant/packed_layout.py`): few rows of x by a kernel that dequantizes on the
way, many by torch's GEMM with one dequantized slab of the matrix after the other. Batch-invariant operations always use
the kernel.
"""

from __future__ import annotations

from typing import Final

import torch

from stoker_engine.architectures.stored_formats import StoredFormat
from stoker_engine.kernels.bundle import BlockPanels, Operation
from stoker_engine.kernels.triton.gemm.packed_quant_gemm import packed_quant_gemm
from stoker_engine.kernels.triton.quant.dequantize_packed import dequantize_packed
from stoker_engine.kernels.triton.quant.pack import pack
from stoker_engine.kernels.triton.quant.packed_layout import ROWS, PackedMatrix, fit, packed_matrix
from stoker_engine.kernels.triton.quant.packed_rows import packed_rows
from stoker_engine.sizing.packed_weights import slab_rows

#: Largest number of rows that the kernel multiplies; a guess for Hopper that was not measured.
FEW_ROWS: Final = 128


def packed_linear(
    blocks: torch.Tensor,
    stored: StoredFormat,
    inner: int,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    is_fixed: bool = False,
) -> Operation:
    """See `BlockPanels.linear`.

    Args:
        is_fixed: whether a row's bits must not depend on the number of rows.
    """
    matrix = packed_matrix(blocks, stored, inner)

    def multiply(x: torch.Tensor) -> torch.Tensor:
        rows = x if x.dim() == 2 and x.stride(1) == 1 else x.contiguous().view(-1, inner)
        if is_fixed or len(rows) <= FEW_ROWS:
            out = packed_quant_gemm(rows, matrix, bias, is_fixed)
        else:
            out = _by_slabs(rows, matrix, bias)
        return out if x.dim() == 2 else out.view(*x.shape[:-1], matrix.outputs)

    return multiply


def _by_slabs(x: torch.Tensor, matrix: PackedMatrix, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply x [rows, inner] by dequantized slabs of the matrix, which share memory."""
    out = x.new_empty(len(x), matrix.outputs)
    step = slab_rows(matrix.outputs, matrix.inner, x.itemsize, ROWS)
    slab = x.new_empty(step, matrix.inner)
    for first in range(0, matrix.outputs, step):
        weights = slab[: matrix.outputs - first]
        end = first + len(weights)
        dequantize_packed(matrix, first, weights)
        if bias is None:
            torch.mm(x, weights.t(), out=out[:, first:end])
        else:
            torch.addmm(bias[first:end], x, weights.t(), out=out[:, first:end])
    return out


def block_panels(is_fixed: bool) -> BlockPanels:
    """Return the operations on packed matrices.

    Args:
        is_fixed: see `packed_linear`.
    """
    return BlockPanels(
        fit=fit,
        pack=pack,
        linear=lambda blocks, stored, inner, dtype, bias=None: packed_linear(
            blocks, stored, inner, dtype, bias, is_fixed
        ),
        rows=packed_rows,
        fit_stack=fit,
    )
