"""Log-probabilities (`kernels/logprobs.py` defines them). One program computes a row."""

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
_WARPS: Final = 8


@triton.jit
def _logprobs(logits, tokens, numbers, ranks, size, row_stride: tl.int64, PART: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    part = tl.arange(0, PART)
    token_logit = tl.load(logits + tl.load(tokens + row))
    tops = tl.full([PART], float("-inf"), tl.float32)
    likelier = tl.zeros([PART], tl.int32)
    for begin in tl.range(0, size, PART):
        some = tl.load(logits + begin + part, mask=begin + part < size, other=float("-inf"))
        tops = tl.maximum(tops, some)
        likelier += tl.where(some > token_logit, 1, 0)
    top = tl.max(tops, 0)
    sums = tl.zeros([PART], tl.float32)
    for begin in tl.range(0, size, PART):
        some = tl.load(logits + begin + part, mask=begin + part < size, other=float("-inf"))
        sums += tl.exp(some - top)
    total = tl.log(tl.sum(sums, 0))
    tl.store(numbers + row * 3, token_logit - top - total)
    tl.store(numbers + row * 3 + 1, top)
    tl.store(numbers + row * 3 + 2, total)
    tl.store(ranks + row, tl.sum(likelier, 0).to(tl.int64) + 1)


@operation("stoker::logprobs")
def logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kernels.logprobs.logprobs`."""
    numbers = torch.empty(len(logits), 3, dtype=torch.float32, device=logits.device)
    ranks = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if len(logits):
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        _logprobs[(len(logits),)](
            logits,
            tokens.contiguous(),
            numbers,
            ranks,
            logits.shape[1],
            logits.stride(0),
            PART=_PART,
            num_warps=_WARPS,
        )
    return numbers, ranks


@logprobs.register_fake
def _(logits: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, device = len(logits), logits.device
    return (
        torch.empty(rows, 3, dtype=torch.float32, device=device),
        torch.empty(rows, dtype=torch.int64, device=device),
    )


def kernel_variants(gpu: GpuTarget) -> Iterator[KernelVariant]:
    """See `attention.decode.kernel_variants`."""
    pointers = {"logits": "fp32", "tokens": "i64", "numbers": "fp32", "ranks": "i64"}
    yield KernelVariant.of("logprobs", _logprobs, pointers, {"size": "i32"}, {"PART": _PART}, _WARPS)
