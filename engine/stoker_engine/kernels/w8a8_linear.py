"""Linear operations with weights and activations of 8 bits (W8A8), e4m3 or int8, which tensor cores multiply.

Each row of the activations (a token) is quantized by its largest magnitude, or each group of its columns by that of the
group. Each row of the weight has a scale, or one for each group:

    y[t, o]  =  Σ over groups g   scale of x[t, g] × scale of w[o, g] × Σ in g of values of x[t] × values of w[o]
"""

from __future__ import annotations

from typing import Final, Protocol

import torch
from torch.nn import functional

from stoker_engine.kernels.bundle import QuantizedRows, RowFormat

#: Dtype of values → the value to which a group's largest magnitude is scaled.
LARGEST: Final = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}

#: Smallest scale: without it, a row of zeros would be divided by 0, and tiny scales have no finite reciprocal.
LEAST_SCALE: Final = 2.0**-100

#: Number of elements of which rows and columns of a matrix must be a multiple for torch's `_scaled_mm` and `_int_mm`,
#: and for aligned loads.
MULTIPLE: Final = 16


class MultiplyW8A8(Protocol):
    """A linear operation of one `RowFormat`."""

    def __call__(
        self,
        x: QuantizedRows,
        codes: torch.Tensor,
        scales: torch.Tensor,
        dtype: torch.dtype,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return x Wᵀ + b in `dtype`, [rows, outputs].

        Args:
            codes: [outputs, inner] of x's dtype, both multiples of `MULTIPLE`, contiguous.
            scales: [groups, outputs] in float32; those of groups also in float16 or bfloat16.
            bias: [outputs] in `dtype`.
        """
        ...


def quantize_rows(x: torch.Tensor, format: RowFormat = RowFormat.FP8_ROWS) -> QuantizedRows:
    """Quantize the rows of `x` [..., inner], of any floating dtype: the largest magnitude of each group becomes the
    dtype's largest value, and values are rounded to the nearest, ties to even.

    The scale of a group that holds NaN or infinity is not finite, so that products with it are not finite, either.
    """
    inner, largest = x.shape[-1], LARGEST[format.dtype]
    rows = x.reshape(-1, inner).float()
    padded = functional.pad(rows, (0, format.groups(inner) * (format.group or inner) - inner))
    grouped = padded.unflatten(-1, (-1, format.group or inner))
    scales = (grouped.abs().amax(-1) / largest).clamp(min=LEAST_SCALE)
    values = (grouped * (1.0 / scales).unsqueeze(-1)).clamp(-largest, largest)
    if format.dtype == torch.int8:
        values = values.round().nan_to_num(0.0)
    return QuantizedRows(values.flatten(-2)[:, :inner].to(format.dtype).contiguous(), scales)


def fp8_linear(
    x: QuantizedRows, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """See `MultiplyW8A8`, for `RowFormat.FP8_ROWS` and bfloat16, the only dtype of results that torch supports with
    scales for rows on all GPUs.

    GPUs use fast accumulation, as vLLM's CUTLASS kernels do: on Hopper partial sums stay in tensor cores, which keep
    about 14 bits of them (DeepSeek-V3's technical report, 2024), instead of being added up in float32.
    """
    return torch._scaled_mm(
        x.values, codes.t(), x.scales, scales, bias=bias, out_dtype=dtype, use_fast_accum=x.values.is_cuda
    )


def fp8_group_linear(
    x: QuantizedRows, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """See `MultiplyW8A8`, for `RowFormat.FP8_GROUPS`: the sum of each group is scaled, and added in float32."""
    total = torch.zeros(len(x.values), len(codes), device=codes.device)
    for group, scale in enumerate(scales.float()):
        first = group * RowFormat.FP8_GROUPS.group
        columns = slice(first, first + RowFormat.FP8_GROUPS.group)
        sums = x.values[:, columns].float() @ codes[:, columns].float().t()
        total += sums * scale * x.scales[:, group : group + 1]
    return (total if bias is None else total + bias.float()).to(dtype)


def int8_linear(
    x: QuantizedRows, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """See `MultiplyW8A8`, for `RowFormat.INT8_ROWS`. Sums are exact, so a row has the same bits in every batch."""
    total = torch._int_mm(x.values, codes.t()).float() * scales.float() * x.scales
    return (total if bias is None else total + bias.float()).to(dtype)
