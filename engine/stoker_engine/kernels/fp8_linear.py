"""Linear operations with weights and activations in e4m3 (W8A8), which FP8 tensor cores multiply.

Each row of the weight has a scale, and each row of the activations (a token) gets one from its largest magnitude:

    y[t, o]  =  scale of x[t] × scale of w[o] × Σ values of x[t] × values of w[o]
"""

from __future__ import annotations

from typing import Final

import torch

from stoker_engine.kernels.bundle import QuantizedRows

#: Largest value of e4m3.
LARGEST: Final = 448.0

#: Smallest scale: without it, a row of zeros would be divided by 0, and tiny scales have no finite reciprocal.
LEAST_SCALE: Final = 2.0**-100

#: Number of elements of which rows and columns of a matrix must be a multiple for torch's `_scaled_mm`.
MULTIPLE: Final = 16


def quantize_rows(x: torch.Tensor) -> QuantizedRows:
    """Quantize the rows of `x` [..., inner], of any floating dtype: the largest magnitude becomes 448, and values are
    rounded to the nearest, ties to even.

    The scale of a row that holds NaN or infinity is not finite, so that products with it are not finite, either.
    """
    rows = x.reshape(-1, x.shape[-1]).float()
    scales = (rows.abs().amax(-1, keepdim=True) / LARGEST).clamp(min=LEAST_SCALE)
    values = (rows * (1.0 / scales)).clamp(-LARGEST, LARGEST)
    return QuantizedRows(values.to(torch.float8_e4m3fn), scales)


def fp8_linear(
    x: QuantizedRows, weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return x Wᵀ + b in `dtype`, [rows, outputs].

    GPUs use fast accumulation, as vLLM's CUTLASS kernels do: on Hopper partial sums stay in tensor cores, which keep
    about 14 bits of them (DeepSeek-V3's technical report, 2024), instead of being added up in float32.

    Args:
        weight: float8_e4m3fn [outputs, inner], both multiples of `MULTIPLE`, contiguous in rows.
        scales: float32 [1, outputs].
        dtype: bfloat16, the only result with scales for rows that torch computes on all GPUs.
        bias: [outputs] in `dtype`.
    """
    return torch._scaled_mm(
        x.values, weight.t(), x.scales, scales, bias=bias, out_dtype=dtype, use_fast_accum=x.values.is_cuda
    )
