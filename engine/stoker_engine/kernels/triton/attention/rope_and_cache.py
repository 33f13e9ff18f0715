"""Normalises and rotates queries and keys of a layer's QKV projection, and stores keys and values, in one kernel.

    q q q q │ k k │ v v      a token's row: heads of queries, of keys, of values
    └ norm, RoPE ─┘
    └ back  │ └ cache ┘      queries are written back; one program computes a head of a token

`kernels/rms_norm.py`, `kernels/rotary.py` and `kernels/kv_store.py` define the operations.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from stoker_engine.kernels.kv_store import LARGEST
from stoker_engine.kernels.triton.attention.kv_store import fitted, token_scale
from stoker_engine.kernels.triton.common.arithmetic import rounded, widened
from stoker_engine.kernels.triton.common.float8 import PLAIN, code_of, stored_bytes
from stoker_engine.kernels.triton.common.gpu_target import GpuTarget
from stoker_engine.kernels.triton.common.kernel_variant import KernelVariant
from stoker_engine.kernels.triton.common.operation import operation


@triton.jit
def largest_within(x):  # type: ignore[no-untyped-def]
    size = tl.abs(x)
    return tl.max(tl.where(size < float("inf"), size, 0.0), 0)


@triton.jit
def is_broken_within(x):  # type: ignore[no-untyped-def]
    return tl.max(tl.where(tl.abs(x) < float("inf"), 0, 1), 0)


@triton.jit
def _rope_and_cache(  # type: ignore[no-untyped-def]
    qkv,
    q_weight,
    k_weight,
    cos,
    sin,
    keys,
    values,
    key_scales,
    value_scales,
    slot_mapping,
    eps,
    qkv_token: tl.int64,
    key_block: tl.int64,
    key_slot: tl.int64,
    key_head: tl.int64,
    value_block: tl.int64,
    value_slot: tl.int64,
    value_head: tl.int64,
    scale_block: tl.int64,
    scale_slot: tl.int64,
    scale_head: tl.int64,
    value_scale_block: tl.int64,
    value_scale_slot: tl.int64,
    value_scale_head: tl.int64,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PAIRS: tl.constexpr,
    PADDED: tl.constexpr,
    REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORMED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CODE: tl.constexpr,
    LIMIT: tl.constexpr,
    OF_TOKENS: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    to = tl.load(slot_mapping + token)
    if (to < 0) & (head >= HEADS):
        return
    DTYPE: tl.constexpr = qkv.dtype.element_ty
    row = qkv + token * qkv_token + head * SIZE
    pair = tl.arange(0, PADDED)
    is_pair = pair < PAIRS
    first_at = 2 * pair if INTERLEAVED else pair
    second_at = 2 * pair + 1 if INTERLEAVED else PAIRS + pair
    unrotated_at = 2 * PAIRS + tl.arange(0, REST)
    is_unrotated = unrotated_at < SIZE
    first = widened(tl.load(row + first_at, mask=is_pair, other=0.0))
    second = widened(tl.load(row + second_at, mask=is_pair, other=0.0))
    unrotated = widened(tl.load(row + unrotated_at, mask=is_unrotated, other=0.0))

    if head < HEADS + KV_HEADS:
        if NORMED:
            weight = q_weight
            if head >= HEADS:
                weight = k_weight
            squares = tl.sum(first * first, 0) + tl.sum(second * second, 0) + tl.sum(unrotated * unrotated, 0)
            factor = tl.rsqrt(squares / SIZE + eps)
            first, second, unrotated = first * factor, second * factor, unrotated * factor
            if q_weight.dtype.element_ty != tl.float32:
                first, second = widened(rounded(first, DTYPE)), widened(rounded(second, DTYPE))
                unrotated = widened(rounded(unrotated, DTYPE))
            first *= widened(tl.load(weight + first_at, mask=is_pair, other=0.0))
            second *= widened(tl.load(weight + second_at, mask=is_pair, other=0.0))
            unrotated *= widened(tl.load(weight + unrotated_at, mask=is_unrotated, other=0.0))
            first, second = widened(rounded(first, DTYPE)), widened(rounded(second, DTYPE))
            unrotated = widened(rounded(unrotated, DTYPE))
        if PAIRS > 0:
            c = widened(tl.load(cos + token * PAIRS + pair, mask=is_pair, other=0.0))
            s = widened(tl.load(sin + token * PAIRS + pair, mask=is_pair, other=0.0))
            rotated = first * c - second * s
            second = widened(rounded(second * c + first * s, DTYPE))
            first = widened(rounded(rotated, DTYPE))

    if head < HEADS:
        tl.store(row + first_at, rounded(first, DTYPE), mask=is_pair)
        tl.store(row + second_at, rounded(second, DTYPE), mask=is_pair)
        tl.store(row + unrotated_at, rounded(unrotated, DTYPE), mask=is_unrotated)
    else:
        block, slot = to // BLOCK_SIZE, to % BLOCK_SIZE
        of_cache = keys + block * key_block + slot * key_slot + (head - HEADS) * key_head
        if head >= HEADS + KV_HEADS:
            of_cache = values + block * value_block + slot * value_slot + (head - HEADS - KV_HEADS) * value_head
        if CODE == 0:
            tl.store(of_cache + first_at, rounded(first, keys.dtype.element_ty), mask=is_pair)
            tl.store(of_cache + second_at, rounded(second, keys.dtype.element_ty), mask=is_pair)
            tl.store(of_cache + unrotated_at, rounded(unrotated, keys.dtype.element_ty), mask=is_unrotated)
        else:
            of_scale = key_scales + block * scale_block + slot * scale_slot + (head - HEADS) * scale_head
            if head >= HEADS + KV_HEADS:
                of_scale = value_scales + block * value_scale_block + slot * value_scale_slot
                of_scale += (head - HEADS - KV_HEADS) * value_scale_head
            if OF_TOKENS:
                largest = tl.maximum(
                    tl.maximum(largest_within(first), largest_within(second)), largest_within(unrotated)
                )
                is_broken = is_broken_within(first) + is_broken_within(second) + is_broken_within(unrotated) > 0
                scale = token_scale(largest, is_broken, LIMIT)
                tl.store(of_scale, scale)
            else:
                scale = tl.load(of_scale)
            tl.store(of_cache + first_at, fitted(first, scale, CODE, LIMIT), mask=is_pair)
            tl.store(of_cache + second_at, fitted(second, scale, CODE, LIMIT), mask=is_pair)
            tl.store(of_cache + unrotated_at, fitted(unrotated, scale, CODE, LIMIT), mask=is_unrotated)


@operation("stoker::rope_and_cache", mutates_args=("qkv", "key_cache", "value_cache", "key_scales", "value_scales"))
def rope_and_cache(
    qkv: torch.Tensor,
    num_heads: int,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    interleaved: bool,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
    scales_of_tokens: bool,
    slot_mapping: torch.Tensor,
) -> None:
    """Normalise and rotate queries (in place) and keys; store keys and values. See `attention.backend.KVCache`.

    Args:
        qkv: [tokens, heads + 2 × kv_heads, head_dim]; only queries are changed.
        num_heads: number of query heads.
        q_weight, k_weight: [head_dim], weights of the RMS norms of heads; None: no norms.
        cos, sin: [tokens, 1, pairs]; None: no rotation.
        slot_mapping: [tokens] int64; tokens with negative slots are not stored.
    """
    tokens, heads, size = qkv.shape
    kv_heads = key_cache.shape[2]
    assert heads == num_heads + 2 * kv_heads and qkv.stride()[1:] == (size, 1)
    assert key_cache.shape[3] == value_cache.shape[3] == size
    if not tokens:
        return
    pairs = 0 if cos is None else cos.shape[-1]
    code = code_of(key_cache.dtype)
    keys, values = stored_bytes(key_cache), stored_bytes(value_cache)
    _rope_and_cache[(tokens, heads)](
        qkv,
        q_weight,
        k_weight,
        None if cos is None else cos.contiguous(),
        None if sin is None else sin.contiguous(),
        keys,
        values,
        key_scales,
        value_scales,
        slot_mapping,
        eps,
        qkv.stride(0),
        *keys.stride()[:3],
        *values.stride()[:3],
        *(key_scales.stride() if key_scales is not None else (0, 0, 0)),
        *(value_scales.stride() if value_scales is not None else (0, 0, 0)),
        **_constants(num_heads, kv_heads, size, pairs, interleaved, q_weight is not None),
        BLOCK_SIZE=key_cache.shape[1],
        CODE=code,
        LIMIT=LARGEST[key_cache.dtype] if code != PLAIN else 0.0,
        OF_TOKENS=scales_of_tokens,
        num_warps=1,
    )


@rope_and_cache.register_fake
def _(
    qkv: torch.Tensor,
    num_heads: int,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    interleaved: bool,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
    scales_of_tokens: bool,
    slot_mapping: torch.Tensor,
) -> None:
    pass


def _constants(heads: int, kv_heads: int, size: int, pairs: int, interleaved: bool, normed: bool) -> dict[str, object]:
    return {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "SIZE": size,
        "PAIRS": pairs,
        "PADDED": triton.next_power_of_2(max(pairs, 1)),
        "REST": triton.next_power_of_2(max(size - 2 * pairs, 1)),
        "INTERLEAVED": interleaved,
        "NORMED": normed,
    }


def kernel_variants(gpu: GpuTarget) -> Iterator[KernelVariant]:
    """See `attention.decode.kernel_variants`."""
    weights, cos_sin = dict.fromkeys(("q_weight", "k_weight"), "bf16"), dict.fromkeys(("cos", "sin"), "bf16")
    of_scales = dict.fromkeys(("key_scales", "value_scales"), "fp32")
    for name, dtype, size, pairs, normed in (
        ("bf16", None, 128, 64, False),
        ("normed bf16", None, 128, 64, True),
        ("normed e4m3", torch.float8_e4m3fn, 128, 64, True),
        ("part of 80 int8", torch.int8, 80, 16, False),
        ("256 unrotated bf16", None, 256, 0, False),
    ):
        stored = "bf16" if dtype is None else "u8"
        pointers = {"qkv": "bf16", "keys": stored, "values": stored, "slot_mapping": "i64"}
        absent: dict[str, object] = {}
        for present, of in ((normed, weights), (pairs > 0, cos_sin), (dtype is not None, of_scales)):
            if present:
                pointers |= of
            else:
                absent |= dict.fromkeys(of)
        constants = _constants(32, 8, size, pairs, False, normed) | absent
        constants |= {
            "BLOCK_SIZE": 16,
            "CODE": PLAIN if dtype is None else code_of(dtype),
            "LIMIT": 0.0 if dtype is None else LARGEST[dtype],
            "OF_TOKENS": dtype == torch.int8,
        }
        yield KernelVariant.of(f"rope_and_cache {name}", _rope_and_cache, pointers, {"eps": "fp32"}, constants, 1)
