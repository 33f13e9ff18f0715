"""Rotary position embedding (`kernels/rotary.py` defines it). One program computes a head of a token.

Most layers use `triton/attention/rope_and_cache.py` instead, which also stores keys and values.
"""

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
def _rotate(  # type: ignore[no-untyped-def]
    x,
    cos,
    sin,
    out,
    x_token: tl.int64,
    x_head: tl.int64,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PAIRS: tl.constexpr,
    PADDED: tl.constexpr,
    REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    DTYPE: tl.constexpr = out.dtype.element_ty
    pair = tl.arange(0, PADDED)
    is_pair = pair < PAIRS
    first_at = 2 * pair if INTERLEAVED else pair
    second_at = 2 * pair + 1 if INTERLEAVED else PAIRS + pair
    row, to = x + token * x_token + head * x_head, out + (token * HEADS + head) * SIZE
    first = widened(tl.load(row + first_at, mask=is_pair, other=0.0))
    second = widened(tl.load(row + second_at, mask=is_pair, other=0.0))
    c = widened(tl.load(cos + token * PAIRS + pair, mask=is_pair, other=0.0))
    s = widened(tl.load(sin + token * PAIRS + pair, mask=is_pair, other=0.0))
    tl.store(to + first_at, rounded(first * c - second * s, DTYPE), mask=is_pair)
    tl.store(to + second_at, rounded(second * c + first * s, DTYPE), mask=is_pair)
    if REST > 0:
        unrotated_at = 2 * PAIRS + tl.arange(0, REST)
        tl.store(
            to + unrotated_at,
            tl.load(row + unrotated_at, mask=unrotated_at < SIZE, other=0.0),
            mask=unrotated_at < SIZE,
        )


@operation("stoker::apply_rotary")
def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """See `kernels.rotary.apply_rotary`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tokens, heads, size = x.shape
    if not out.numel():
        return out
    x = x if x.stride(2) == 1 else x.contiguous()
    pairs = cos.shape[-1]
    assert len(cos) == len(sin) == tokens
    num_unrotated = size - 2 * pairs
    _rotate[(tokens, heads)](
        x,
        cos.contiguous(),
        sin.contiguous(),
        out,
        *x.stride()[:2],
        HEADS=heads,
        SIZE=size,
        PAIRS=pairs,
        PADDED=triton.next_power_of_2(pairs),
        REST=triton.next_power_of_2(num_unrotated) if num_unrotated else 0,
        INTERLEAVED=interleaved,
        num_warps=1,
    )
    return out


@apply_rotary.register_fake
def _(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def kernel_variants(gpu: GpuTarget) -> Iterator[KernelVariant]:
    """See `attention.decode.kernel_variants`."""
    for name, size, pairs, interleaved in (
        ("128", 128, 64, False),
        ("part of 80", 80, 16, False),
        ("pairs", 64, 32, True),
    ):
        num_unrotated = size - 2 * pairs
        constants = {
            "HEADS": 32,
            "SIZE": size,
            "PAIRS": pairs,
            "PADDED": triton.next_power_of_2(pairs),
            "REST": triton.next_power_of_2(num_unrotated) if num_unrotated else 0,
            "INTERLEAVED": interleaved,
        }
        pointers = dict.fromkeys(("x", "cos", "sin", "out"), "bf16")
        yield KernelVariant.of(f"rotary {name}", _rotate, pointers, {}, constants, 1)
