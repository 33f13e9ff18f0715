"""Samples a token from each row of logits (`kernels/select_token.py` defines it). One program computes a row.

Works without sorting: a token's distance below the largest logit is a non-negative float, and the bits of such floats,
read as integers, have the same order. The distance of the last token that top-k or top-p keeps is found by reducing an
interval of integers to a quarter in each pass over the row. (Sampling without sorting: FlashInfer,
"Sorting-Free GPU Kernels for LLM Sampling", 2025.)

Weights are integers: exp(-distance) in units of 2^-40, rounded down. Sums are exact in any order, so a row's token is
the same in every batch. Tokens of weight 0 are never drawn.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
import triton
import triton.language as tl

from stoker_engine.kernels.select_token import COLUMNS, LEAST, SCALE, TOP_K, TOP_P, UNIFORM
from stoker_engine.kernels.triton.common.gpu_target import GpuTarget
from stoker_engine.kernels.triton.common.kernel_variant import KernelVariant
from stoker_engine.kernels.triton.common.operation import operation

_PART: Final = 4096
_WARPS: Final = 16
_INFINITE: Final = tl.constexpr(0x7F800000)
_WIDTH: Final = tl.constexpr(len(COLUMNS))
_SCALE: Final = tl.constexpr(SCALE)
_TOP_K: Final = tl.constexpr(TOP_K)
_TOP_P: Final = tl.constexpr(TOP_P)
_LEAST: Final = tl.constexpr(LEAST)
_UNIFORM: Final = tl.constexpr(UNIFORM)


@triton.jit
def _distances(logits, begin, size, largest, scale, PART: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return each token's scaled distance below `largest`, as bits of a float32; the maximum beyond the row's end."""
    at = begin + tl.arange(0, PART)
    numbers = tl.load(logits + at, mask=at < size, other=0.0)
    bits = ((numbers - largest) * scale).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.where(at < size, bits, 0x7FFFFFFF)


@triton.jit
def _weights(distances):  # type: ignore[no-untyped-def]
    far = tl.minimum(distances, _INFINITE).to(tl.float32, bitcast=True)
    return (tl.exp(-far) * 1099511627776.0).to(tl.int64)  # 2^40


@triton.jit
def _mass(logits, size, largest, scale, limit, PART: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the sum of weights of tokens up to a distance."""
    mass = tl.zeros([PART], tl.int64)
    for begin in tl.range(0, size, PART):
        distances = _distances(logits, begin, size, largest, scale, PART)
        mass += tl.where(distances <= limit, _weights(distances), 0)
    return tl.sum(mass, 0)


@triton.jit
def _reaching(  # type: ignore[no-untyped-def]
    logits, size, largest, scale, limit, target, WEIGHED: tl.constexpr, PART: tl.constexpr
):
    """Return the smallest distance up to which the number of tokens, or their weight if `WEIGHED`, reaches `target`;
    and the number or weight of tokens that are nearer. Tokens up to `limit` must reach `target`."""
    low = tl.full([], -1, tl.int32)
    nearer = tl.full([], 0, tl.int64)
    high = limit
    while high - low > 1:
        step = tl.maximum((high - low) // 4, 1)
        a = low + step
        b = tl.minimum(a, high - step) + step
        c = tl.minimum(b, high - step) + step
        upto_a = tl.zeros([PART], tl.int64)
        upto_b = tl.zeros([PART], tl.int64)
        upto_c = tl.zeros([PART], tl.int64)
        for begin in tl.range(0, size, PART):
            distances = _distances(logits, begin, size, largest, scale, PART)
            amounts = _weights(distances) if WEIGHED else tl.full([PART], 1, tl.int64)
            upto_a += tl.where(distances <= a, amounts, 0)
            upto_b += tl.where(distances <= b, amounts, 0)
            upto_c += tl.where(distances <= c, amounts, 0)
        sum_a = tl.sum(upto_a, 0)
        sum_b = tl.sum(upto_b, 0)
        sum_c = tl.sum(upto_c, 0)
        in_a = sum_a.to(tl.float64) >= target
        in_b = sum_b.to(tl.float64) >= target
        in_c = sum_c.to(tl.float64) >= target
        high = tl.where(in_a, a, tl.where(in_b, b, tl.where(in_c, c, high)))
        nearer = tl.where(in_a, nearer, tl.where(in_b, sum_a, tl.where(in_c, sum_b, sum_c)))
        low = tl.where(in_a, low, tl.where(in_b, a, tl.where(in_c, b, c)))
    return high, nearer


@triton.jit(do_not_specialize=["size"])
def _keep_likely(  # type: ignore[no-untyped-def]
    logits,
    parameters,
    largest,
    last,
    size,
    row_stride: tl.int64,
    PART: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    parameters += row * _WIDTH
    tops = tl.full([PART], float("-inf"), tl.float32)
    for begin in tl.range(0, size, PART):
        at = begin + tl.arange(0, PART)
        tops = tl.maximum(tops, tl.load(logits + at, mask=at < size, other=float("-inf")))
    top = tl.max(tops, 0)

    scale = tl.load(parameters + _SCALE).to(tl.float32)
    top_k = tl.load(parameters + _TOP_K)
    top_p = tl.load(parameters + _TOP_P)
    limit = tl.load(parameters + _LEAST).to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    counts = (top_k > 0) & (top_k < size)
    kth = tl.full([], _INFINITE, tl.int32)
    nearer = tl.full([], 0, tl.int64)
    if counts:
        kth, nearer = _reaching(logits, size, top, scale, kth, top_k, False, PART)
    if top_p < 1:
        # The total weight of exactly k tokens: further ties with the last one are kept, but not counted.
        total = _mass(logits, size, top, scale, tl.minimum(limit, tl.where(counts, kth - 1, kth)), PART)
        if counts & (kth <= limit):
            total += (top_k.to(tl.int64) - nearer) * _weights(kth)
        limit = tl.minimum(limit, kth)
        limit, nearer = _reaching(logits, size, top, scale, limit, top_p * total.to(tl.float64), True, PART)
    tl.store(largest + row, top)
    tl.store(last + row, tl.minimum(limit, kth))


@triton.jit(do_not_specialize=["size"])
def _sample(  # type: ignore[no-untyped-def]
    logits,
    parameters,
    largest,
    last,
    tokens,
    size,
    row_stride: tl.int64,
    PART: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    parameters += row * _WIDTH
    scale = tl.load(parameters + _SCALE).to(tl.float32)
    uniform = tl.load(parameters + _UNIFORM)
    top = tl.load(largest + row)
    limit = tl.load(last + row)
    total = _mass(logits, size, top, scale, limit, PART)
    target = tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)

    begin = tl.full([], 0, tl.int32)
    before = tl.full([], 0, tl.int64)
    distances = _distances(logits, begin, size, top, scale, PART)
    weights = tl.where(distances <= limit, _weights(distances), 0)
    after = tl.sum(weights, 0)
    while (after <= target) & (begin < size - PART):
        begin += PART
        before = after
        distances = _distances(logits, begin, size, top, scale, PART)
        weights = tl.where(distances <= limit, _weights(distances), 0)
        after += tl.sum(weights, 0)
    running = before + tl.cumsum(weights, 0)
    token = begin + tl.sum((running <= target).to(tl.int32), 0)
    tl.store(tokens + row, tl.minimum(token, size - 1).to(tl.int64))


def thresholds(logits: torch.Tensor, parameters: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's largest logit, float32 [rows], and the largest scaled distance of a kept token below it, the
    bits of a float32 as int32 [rows]. `logits` must be contiguous in rows, as `select_token` ensures."""
    largest = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    last = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    _keep_likely[(len(logits),)](
        logits, parameters, largest, last, logits.shape[1], logits.stride(0), PART=_PART, num_warps=_WARPS
    )
    return largest, last


@operation("stoker::select_token")
def select_token(logits: torch.Tensor, parameters: torch.Tensor) -> torch.Tensor:
    """See `kernels.select_token.select_token`. Does not synchronize."""
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if len(logits):
        assert parameters.is_contiguous() and parameters.shape == (len(logits), len(COLUMNS))
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        largest, last = thresholds(logits, parameters)
        _sample[(len(logits),)](
            logits,
            parameters,
            largest,
            last,
            tokens,
            logits.shape[1],
            logits.stride(0),
            PART=_PART,
            num_warps=_WARPS,
        )
    return tokens


@select_token.register_fake
def _(logits: torch.Tensor, parameters: torch.Tensor) -> torch.Tensor:
    return torch.empty(len(logits), dtype=torch.int64, device=logits.device)


def kernel_variants(gpu: GpuTarget) -> Iterator[KernelVariant]:
    """See `attention.decode.kernel_variants`."""
    pointers = {"logits": "fp32", "parameters": "fp64", "largest": "fp32", "last": "i32", "tokens": "i64"}
    for name, kernel in (("thresholds", _keep_likely), ("draw", _sample)):
        yield KernelVariant.of(f"select_token {name}", kernel, pointers, {"size": "i32"}, {"PART": _PART}, _WARPS)
