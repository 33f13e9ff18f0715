"""Concatenates heads with a rotated part (`kernels/rotary.concat_rotated` defines it). One program computes a head of a
token."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from stoker_engine.kernels.triton.common.arithmetic import rounded, widened
from stoker_engine.kernels.triton.common.gpu_target import GpuTarget
from stoker_engine.kernels.triton.common.kernel_variant import KernelVariant
from stoker_engine.kernels.triton.common.operation import operation


@triton.jit
def _concat_rotated(  # type: ignore[no-untyped-def]
    x,
    rotated,
    cos,
    sin,
    out,
    x_token: tl.int64,
    x_head: tl.int64,
    rotated_token: tl.int64,
    rotated_head: tl.int64,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_PADDED: tl.constexpr,
    PAIRS: tl.constexpr,
    PADDED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    DTYPE: tl.constexpr = out.dtype.element_ty
    to = out + (token * HEADS + head) * (SIZE + 2 * PAIRS)
    at, pair = tl.arange(0, SIZE_PADDED), tl.arange(0, PADDED)
    is_pair = pair < PAIRS
    tl.store(to + at, tl.load(x + token * x_token + head * x_head + at, mask=at < SIZE, other=0.0), mask=at < SIZE)
    first_at = 2 * pair if INTERLEAVED else pair
    second_at = 2 * pair + 1 if INTERLEAVED else PAIRS + pair
    row = rotated + token * rotated_token + head * rotated_head
    first = widened(tl.load(row + first_at, mask=is_pair, other=0.0))
    second = widened(tl.load(row + second_at, mask=is_pair, other=0.0))
    c = widened(tl.load(cos + token * PAIRS + pair, mask=is_pair, other=0.0))
    s = widened(tl.load(sin + token * PAIRS + pair, mask=is_pair, other=0.0))
    tl.store(to + SIZE + first_at, rounded(first * c - second * s, DTYPE), mask=is_pair)
    tl.store(to + SIZE + second_at, rounded(second * c + first * s, DTYPE), mask=is_pair)


@operation("stoker::concat_rotated")
def concat_rotated(
    x: torch.Tensor, rotated: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    """See `kernels.rotary.concat_rotated`."""
    tokens, heads, size = x.shape
    pairs = cos.shape[-1]
    assert rotated.shape == (tokens, heads, 2 * pairs)
    out = torch.empty(tokens, heads, size + 2 * pairs, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    x, rotated = (each if each.stride(2) == 1 else each.contiguous() for each in (x, rotated))
    _concat_rotated[(tokens, heads)](
        x,
        rotated,
        cos.contiguous(),
        sin.contiguous(),
        out,
        *x.stride()[:2],
        *rotated.stride()[:2],
        **_constants(heads, size, pairs, interleaved),
        num_warps=1,
    )
    return out


@concat_rotated.register_fake
def _(x: torch.Tensor, rotated: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    tokens, heads, size = x.shape
    return torch.empty(tokens, heads, size + rotated.shape[2], dtype=x.dtype, device=x.device)


def _constants(heads: int, size: int, pairs: int, interleaved: bool) -> dict[str, object]:
    return {
        "HEADS": heads,
        "SIZE": size,
        "SIZE_PADDED": triton.next_power_of_2(size),
        "PAIRS": pairs,
        "PADDED": triton.next_power_of_2(pairs),
        "INTERLEAVED": interleaved,
    }


def kernel_variants(gpu: GpuTarget) -> Iterator[KernelVariant]:
    """See `attention.decode.kernel_variants`."""
    pointers = dict.fromkeys(("x", "rotated", "cos", "sin", "out"), "bf16")
    yield KernelVariant.of("concat_rotated mla", _concat_rotated, pointers, {}, _constants(128, 512, 32, True), 1)
