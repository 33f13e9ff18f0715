"""Weighted sum of the results of a token's experts. One program computes a part of a token's row.

Results are added in float32 in the order of expert indices, as in `kernels.moe.experts`.
"""

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

_PART: Final = 1024
#: Larger than every sort key (expert index and position of the choice).
_LAST: Final = tl.constexpr(2**62)


@triton.jit
def _combine(  # type: ignore[no-untyped-def]
    results,
    weights,
    chosen,
    out,
    EXPERTS: tl.constexpr,
    TOP: tl.constexpr,
    TOP_PADDED: tl.constexpr,
    SIZE: tl.constexpr,
    PART: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * PART + tl.arange(0, PART)
    choice_index = tl.arange(0, TOP_PADDED)
    experts = tl.load(chosen + token * TOP + choice_index, mask=choice_index < TOP, other=0)
    keys = tl.where(choice_index < TOP, experts * TOP_PADDED + choice_index, _LAST)
    sums = tl.zeros([PART], tl.float32)
    for _ in tl.range(TOP):
        key = tl.min(keys, 0, keep_dims=True)
        keys = tl.where(keys == key, _LAST, keys)
        choice = token * TOP + key % TOP_PADDED
        # Results of choices from EXPERTS on are undefined.
        is_written = (at < SIZE) & (key // TOP_PADDED < EXPERTS)
        result = widened(tl.load(results + choice * SIZE + at, mask=is_written, other=0.0))
        sums += tl.where(is_written, result * tl.load(weights + choice), 0.0)
    tl.store(out + token * SIZE + at, rounded(sums, out.dtype.element_ty), mask=at < SIZE)


@operation("stoker::combine")
def combine(results: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, experts: int) -> torch.Tensor:
    """Compute Σ over a token's experts of weight × result.

    Args:
        results: [tokens × k, size], a row for each of `chosen`.
        weights: [tokens, k] float32.
        chosen: [tokens, k] int64 expert indices. Choices from `experts` on are ignored, and their results not read.

    Returns:
        [tokens, size] of `results`' dtype.
    """
    (tokens, top), size = chosen.shape, results.shape[1]
    out = torch.empty((tokens, size), dtype=results.dtype, device=results.device)
    if out.numel():
        assert results.is_contiguous()
        _combine[(tokens, triton.cdiv(size, _PART))](
            results,
            weights.contiguous(),
            chosen.contiguous(),
            out,
            EXPERTS=experts,
            TOP=top,
            TOP_PADDED=triton.next_power_of_2(top),
            SIZE=size,
            PART=_PART,
            num_warps=4,
        )
    return out


@combine.register_fake
def _(results: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, experts: int) -> torch.Tensor:
    return torch.empty((len(chosen), results.shape[1]), dtype=results.dtype, device=results.device)


def kernel_variants(gpu: GpuTarget) -> Iterator[KernelVariant]:
    """See `attention.decode.kernel_variants`."""
    for dtype, top, size in (("bf16", 8, 7168), ("fp16", 2, 4096), ("fp32", 10, 2880)):
        constants = {"EXPERTS": 32, "TOP": top, "TOP_PADDED": triton.next_power_of_2(top), "SIZE": size, "PART": _PART}
        pointers = {"results": dtype, "weights": "fp32", "chosen": "i64", "out": dtype}
        yield KernelVariant.of(f"combine {top} {dtype}", _combine, pointers, {}, constants)
