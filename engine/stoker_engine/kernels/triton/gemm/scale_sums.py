"""Scaling of the exact sums of a product of int8 (`kernels/w8a8_linear.py: int8_linear`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
import triton
import triton.language as tl

from stoker_engine.kernels.triton.common.arithmetic import rounded, widened
from stoker_engine.kernels.triton.common.gpu_target import GpuTarget
from stoker_engine.kernels.triton.common.kernel_variant import KernelVariant
from stoker_engine.kernels.triton.common.operation import operation

#: Outputs of a program.
_PART: Final = 1024
_WARPS: Final = 4


@triton.jit(do_not_specialize=["outputs"])
def _scale_sums(  # type: ignore[no-untyped-def]
    sums,
    x_scales,
    scales,
    bias,
    out,
    outputs,
    out_row: tl.int64,
    PART: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * PART + tl.arange(0, PART)
    is_output = output < outputs
    total = tl.load(sums + row * outputs + output, mask=is_output, other=0).to(tl.float32)
    total = total * widened(tl.load(scales + output, mask=is_output, other=0.0)) * tl.load(x_scales + row)
    if bias is not None:
        total += widened(tl.load(bias + output, mask=is_output, other=0.0))
    tl.store(out + row * out_row + output, rounded(total, out.dtype.element_ty), mask=is_output)


@operation("stoker::scale_sums", mutates_args=("out",))
def scale_sums(
    sums: torch.Tensor, x_scales: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Write sums × scales × x_scales + bias, computed in float32, to `out`.

    Args:
        sums: int32 [rows, outputs], contiguous.
        x_scales: float32 [rows, 1].
        scales: [outputs], of any floating dtype.
        bias: [outputs], or None.
        out: [rows, outputs], contiguous in rows.
    """
    rows, outputs = sums.shape
    _scale_sums[(rows, triton.cdiv(outputs, _PART))](
        sums, x_scales, scales, bias, out, outputs, out.stride(0), PART=_PART, num_warps=_WARPS
    )


@scale_sums.register_fake
def _(
    sums: torch.Tensor, x_scales: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    return None


def kernel_variants(gpu: GpuTarget) -> Iterator[KernelVariant]:
    """See `attention.decode.kernel_variants`."""
    yield KernelVariant.of(
        "scale_sums bf16",
        _scale_sums,
        {"sums": "i32", "x_scales": "fp32", "scales": "bf16", "bias": "bf16", "out": "bf16"},
        {"outputs": "i32"},
        {"PART": _PART},
        _WARPS,
    )
