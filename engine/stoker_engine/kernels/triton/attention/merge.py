"""Joins the results of a decode's parts (`decode`): in the program that finishes a sequence's last part, or in a launch
of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple, Self

import torch
import triton
import triton.language as tl

from stoker_engine.kernels.triton.attention.arguments import LayerShape
from stoker_engine.kernels.triton.attention.decode_splits import PART_SIZES, num_parts
from stoker_engine.kernels.triton.attention.masks import oldest_visible
from stoker_engine.kernels.triton.attention.online_softmax import with_sink
from stoker_engine.kernels.triton.attention.variants import common_shape
from stoker_engine.kernels.triton.common.arithmetic import rounded
from stoker_engine.kernels.triton.common.gpu_target import GpuTarget
from stoker_engine.kernels.triton.common.kernel_variant import KernelVariant

#: Number of elements of parts that are merged at a time.
_ELEMENTS: Final = tl.constexpr(1024)
#: Arguments that change between steps, for which kernels must not be specialized.
_OF_A_STEP: Final = ["seq_lens", "part_starts"]


class PartResults(NamedTuple):
    """Results of parts: float32 [parts, heads], and [parts, heads, value_dim] for `sums`; see `attend_to_keys`."""

    top: Any
    total: Any
    sums: Any

    @classmethod
    def empty(cls, rows: int, value_dim: int, device: torch.device) -> Self:
        """Return uninitialized results; `rows`: parts × heads."""
        return cls(*(torch.empty(rows * size, dtype=torch.float32, device=device) for size in (1, 1, value_dim)))


@triton.jit
def parts_with_results(length, SHAPE: tl.constexpr, SIZES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the first part of a sequence that has results, and the end."""
    first = 0
    if SHAPE.window > 0:
        first = num_parts(oldest_visible(length - 1, SHAPE.window) + 1, SIZES) - 1
    return first, num_parts(length, SIZES)


@triton.jit
def merge_head(  # type: ignore[no-untyped-def]
    results, first, end, before, token, head, sinks, out, SHAPE: tl.constexpr
):
    """Merge the parts of one head of a decode, and write its row of `out`. Some parts at a time are loaded together,
    since a load takes longer than its arithmetic; which ones depends on the sequence alone.

    Args:
        first, end: see `parts_with_results`.
        before: number of parts of earlier sequences.
    """
    TOGETHER: tl.constexpr = _ELEMENTS // SHAPE.value_padded
    dims = tl.arange(0, SHAPE.value_padded)
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    sums = tl.zeros([1, SHAPE.value_padded], tl.float32)
    for group in tl.range(first, end, TOGETHER, num_stages=1):
        split = group + tl.arange(0, TOGETHER)
        is_part = split < end
        part = (before.to(tl.int64) + split) * SHAPE.num_heads + head
        part_top = tl.load(results.top + part, mask=is_part, other=float("-inf"))
        part_total = tl.load(results.total + part, mask=is_part, other=0.0)
        part_sums = tl.load(
            results.sums + part[:, None] * SHAPE.value_dim + dims[None, :],
            mask=is_part[:, None] & (dims < SHAPE.value_dim)[None, :], other=0.0,
        )  # fmt: skip
        new_top = tl.maximum(top, tl.max(part_top, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        faded, weight = tl.exp2(top - base), tl.exp2(part_top - base)
        total = total * faded + tl.sum(part_total * weight, 0)
        sums = sums * faded[:, None] + tl.sum(part_sums * weight[:, None], 0)[None, :]
        top = new_top
    if sinks is not None:
        sums, total = with_sink(sums, total, top, tl.load(sinks + head + tl.arange(0, 1)))
    result = rounded(sums / tl.where(total == 0.0, 1.0, total)[:, None], out.dtype.element_ty)  # 0 without keys
    row = (tl.zeros([1, 1], tl.int64) + token) * SHAPE.num_heads + head
    tl.store(out + row * SHAPE.value_dim + dims[None, :], result, mask=(dims < SHAPE.value_dim)[None, :])


@triton.jit(do_not_specialize=_OF_A_STEP)
def _merge_parts(  # type: ignore[no-untyped-def]
    results, seq_lens, part_starts, sinks, out, SHAPE: tl.constexpr, SIZES: tl.constexpr
):
    token, head = tl.program_id(0), tl.program_id(1)
    first, end = parts_with_results(tl.load(seq_lens + token), SHAPE, SIZES)
    merge_head(results, first, end, tl.load(part_starts + token), token, head, sinks, out, SHAPE)


def merge_parts(
    results: PartResults,
    seq_lens: torch.Tensor,
    part_starts: torch.Tensor,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    shape: LayerShape,
) -> None:
    """Write the decodes' rows of `out`; see `decode.decode_attention`."""
    _merge_parts[(len(seq_lens), shape.num_heads)](
        results, seq_lens, part_starts, sinks, out, SHAPE=shape, SIZES=PART_SIZES
    )


def kernel_variants(gpu: GpuTarget) -> Iterator[KernelVariant]:
    """See `decode.kernel_variants`."""
    yield KernelVariant.of(
        "attention join",
        _merge_parts,
        {"seq_lens": "i32", "part_starts": "i32", "out": "bf16"},
        {},
        {"sinks": None, "SHAPE": common_shape(gpu), "SIZES": PART_SIZES},
        tuples={"results": PartResults("*fp32", "*fp32", "*fp32")},
    )
