"""Masks tokens that a grammar does not allow (see `kernels/token_mask.py`). One program masks part of a row."""

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
def _keep_allowed(  # type: ignore[no-untyped-def]
    logits,
    rows,
    allowed,
    size,
    logits_row: tl.int64,
    allowed_row: tl.int64,
    PART: tl.constexpr,
):
    number = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + number)
    token = tl.program_id(1) * PART + tl.arange(0, PART)
    is_token = token < size
    words = tl.load(allowed + number * allowed_row + token // 32, mask=is_token, other=-1)
    is_allowed = (words >> (token % 32)) & 1
    tl.store(logits + row * logits_row + token, float("-inf"), mask=is_token & (is_allowed == 0))


@operation("stoker::keep_allowed", mutates_args=("logits",))
def keep_allowed(logits: torch.Tensor, rows: torch.Tensor, allowed: torch.Tensor) -> None:
    """See `kernels.token_mask.keep_allowed`."""
    if len(rows):
        size = logits.shape[1]
        assert logits.stride(1) == 1 and rows.is_contiguous()
        assert allowed.stride(1) == 1 and 32 * allowed.shape[1] >= size
        _keep_allowed[(len(rows), triton.cdiv(size, _PART))](
            logits, rows, allowed, size, logits.stride(0), allowed.stride(0), PART=_PART, num_warps=4
        )


@keep_allowed.register_fake
def _(logits: torch.Tensor, rows: torch.Tensor, allowed: torch.Tensor) -> None:
    pass


def kernel_variants(gpu: GpuTarget) -> Iterator[KernelVariant]:
    """See `attention.decode.kernel_variants`."""
    pointers = {"logits": "fp32", "rows": "i64", "allowed": "i32"}
    yield KernelVariant.of("token_mask", _keep_allowed, pointers, {"size": "i32"}, {"PART": _PART})
