"""Argmax (`kernels/argmax.py` defines it). One program computes a row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
import triton
import triton.language as tl

from stoker_engine.kernels.triton.common.gpu_target import GpuTarget
from stoker_engine.kernels.triton.common.kernel_variant import KernelVariant
from stoker_engine.kernels.triton.common.operation import operation

_PART: Final = 4096


@triton.jit
def _argmax(logits, best, largest, size, row_stride: tl.int64, PART: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PART)
    top = tl.full([PART], float("-inf"), tl.float32)
    where = tl.zeros([PART], tl.int32)
    is_broken = tl.zeros([PART], tl.int32)
    for begin in tl.range(0, size, PART):
        at = begin + part
        numbers = tl.load(logits + row * row_stride + at, mask=at < size, other=float("-inf"))
        is_broken |= tl.where(numbers != numbers, 1, 0)
        where = tl.where(numbers > top, at, where)
        top = tl.where(numbers > top, numbers, top)
    number = tl.max(top, 0)
    # The first of equally large logits; index 0 if all are -inf.
    first = tl.min(tl.where(top == number, where, 0x7FFFFFFF), 0)
    first = tl.where(number == float("-inf"), 0, first)
    tl.store(best + row, first.to(tl.int64))
    tl.store(largest + row, tl.where(tl.max(is_broken, 0) > 0, float("nan"), number))


@operation("stoker::argmax")
def argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels.argmax.argmax`."""
    best = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    largest = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    if len(logits):
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        _argmax[(len(logits),)](logits, best, largest, logits.shape[1], logits.stride(0), PART=_PART, num_warps=8)
    return best, largest


@argmax.register_fake
def _(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, device = len(logits), logits.device
    return torch.empty(rows, dtype=torch.int64, device=device), torch.empty(rows, dtype=torch.float32, device=device)


def kernel_variants(gpu: GpuTarget) -> Iterator[KernelVariant]:
    """See `attention.decode.kernel_variants`."""
    pointers = {"logits": "fp32", "best": "i64", "largest": "fp32"}
    yield KernelVariant.of("argmax", _argmax, pointers, {"size": "i32"}, {"PART": _PART}, 8)
