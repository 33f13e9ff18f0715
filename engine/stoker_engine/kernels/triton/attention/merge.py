"""Joins the results of a decode's parts (`decode`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple, Self

import torch
import triton
import triton.language as tl

from stoker_engine.kernels.triton.attention.arguments import LayerShape
from stoker_engine.kernels.triton.attention.decode_splits import PART_KEYS
from stoker_engine.kernels.triton.attention.masks import oldest_visible
from stoker_engine.kernels.triton.attention.online_softmax import with_sink
from stoker_engine.kernels.triton.attention.variants import common_shape
from stoker_engine.kernels.triton.common.arithmetic import rounded
from stoker_engine.kernels.triton.common.gpu_target import GpuTarget
from stoker_engine.kernels.triton.common.kernel_variant import KernelVariant

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


@triton.jit(do_not_specialize=_OF_A_STEP)
def _merge_parts(  # type: ignore[no-untyped-def]
    results, seq_lens, part_starts, sinks, out, SHAPE: tl.constexpr, PART_KEYS: tl.constexpr
):
    """Merge the parts of one head of a decode, in order."""
    token, head = tl.program_id(0), tl.program_id(1)
    length = tl.load(seq_lens + token)
    oldest = oldest_visible(length - 1, SHAPE.window)
    dims = tl.arange(0, SHAPE.value_padded)
    before = tl.load(part_starts + token).to(tl.int64)
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    sums = tl.zeros([1, SHAPE.value_padded], tl.float32)
    for split in range(oldest // PART_KEYS, (length + PART_KEYS - 1) // PART_KEYS):
        part = (before + split) * SHAPE.num_heads + head + tl.arange(0, 1)
        part_top = tl.load(results.top + part)
        new_top = tl.maximum(top, part_top)
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        faded, weight = tl.exp2(top - base), tl.exp2(part_top - base)
        total = total * faded + tl.load(results.total + part) * weight
        part_sums = tl.load(
            results.sums + part[:, None] * SHAPE.value_dim + dims[None, :],
            mask=(dims < SHAPE.value_dim)[None, :], other=0.0,
        )  # fmt: skip
        sums = sums * faded[:, None] + part_sums * weight[:, None]
        top = new_top
    if sinks is not None:
        sums, total = with_sink(sums, total, top, tl.load(sinks + head + tl.arange(0, 1)))
    result = rounded(sums / tl.where(total == 0.0, 1.0, total)[:, None], out.dtype.element_ty)  # 0 without keys
    row = token.to(tl.int64) * SHAPE.num_heads + head
    tl.store(out + row * SHAPE.value_dim + dims[None, :], result, mask=(dims < SHAPE.value_dim)[None, :])


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
        results, seq_lens, part_starts, sinks, out, SHAPE=shape, PART_KEYS=PART_KEYS
    )


def kernel_variants(gpu: GpuTarget) -> Iterator[KernelVariant]:
    """See `decode.kernel_variants`."""
    yield KernelVariant.of(
        "attention join",
        _merge_parts,
        {"seq_lens": "i32", "part_starts": "i32", "out": "bf16"},
        {},
        {"sinks": None, "SHAPE": common_shape(gpu), "PART_KEYS": PART_KEYS},
        tuples={"results": PartResults("*fp32", "*fp32", "*fp32")},
    )
