"""Linear operations with int8 weights and activations: few rows by a kernel that also scales the sums, many by torch's
`_int_mm` with one slab of the matrix after the other (on NVIDIA's GPUs)."""

from __future__ import annotations

from typing import Final

import torch

from stoker_engine.kernels.bundle import QuantizedRows
from stoker_engine.kernels.triton.gemm.scale_sums import scale_sums
from stoker_engine.kernels.triton.gemm.w8a8_gemm import w8a8_gemm
from stoker_engine.kernels.w8a8_linear import MULTIPLE
from stoker_engine.sizing.packed_weights import SLAB_BYTES

#: Largest number of rows that the kernel multiplies; a guess that was not measured. `_int_mm` takes 17 and more.
FEW_ROWS: Final = 128


def int8_linear(
    x: QuantizedRows, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """See `MultiplyW8A8`, for `RowFormat.INT8_ROWS`. The sums of a slab take at most `SLAB_BYTES`, so that they stay in
    the L2 cache until they are scaled. AMD's GPUs always use the kernel."""
    rows, outputs = len(x.values), len(codes)
    if rows <= FEW_ROWS or torch.version.hip is not None:
        return w8a8_gemm(x, codes, scales, dtype, bias)
    out = torch.empty((rows, outputs), dtype=dtype, device=codes.device)
    step = max(1, SLAB_BYTES // (rows * torch.int32.itemsize * MULTIPLE)) * MULTIPLE
    for first in range(0, outputs, step):
        columns = slice(first, first + step)
        scale_sums(
            torch._int_mm(x.values, codes[columns].t()),
            x.scales,
            scales[0, columns],
            None if bias is None else bias[columns],
            out[:, columns],
        )
    return out
