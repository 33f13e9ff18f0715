"""Sum of the partial results of a GEMM whose inner dimension is split among programs, in the order of the parts."""

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

#: Elements of a program: few, so that a row of a small model is summed by several.
_ELEMENTS: Final = 512
_WARPS: Final = 4


@triton.jit(do_not_specialize=["elements"])
def _sum_parts(  # type: ignore[no-untyped-def]
    parts,
    bias,
    out,
    elements,
    outputs,
    PARTS: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    at = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)
    is_element = at < elements
    total = tl.zeros([ELEMENTS], tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts + part * elements + at, mask=is_element, other=0.0)
    if bias is not None:
        total += widened(tl.load(bias + at % outputs, mask=is_element, other=0.0))
    tl.store(out + at, rounded(total, out.dtype.element_ty), mask=is_element)


@operation("stoker::sum_parts")
def sum_parts(parts: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Sum partial results, add the bias, and round.

    Args:
        parts: float32 [parts, rows, outputs], contiguous.
        bias: [outputs] of `dtype`, or None.

    Returns:
        [rows, outputs] of `dtype`.
    """
    out = torch.empty(parts.shape[1:], dtype=dtype, device=parts.device)
    _sum_parts[(triton.cdiv(out.numel(), _ELEMENTS),)](
        parts,
        bias,
        out,
        out.numel(),
        out.shape[1],
        PARTS=len(parts),
        ELEMENTS=_ELEMENTS,
        num_warps=_WARPS,
    )
    return out


@sum_parts.register_fake
def _(parts: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(parts.shape[1:], dtype=dtype, device=parts.device)


def kernel_variants(gpu: GpuTarget) -> Iterator[KernelVariant]:
    """See `attention.decode.kernel_variants`."""
    yield KernelVariant.of(
        "sum_parts bf16",
        _sum_parts,
        {"parts": "fp32", "bias": "bf16", "out": "bf16"},
        {"elements": "i32", "outputs": "i32"},
        {"PARTS": 9, "ELEMENTS": _ELEMENTS},
        _WARPS,
    )
