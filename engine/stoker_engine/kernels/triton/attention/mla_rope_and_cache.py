"""Processes the result of latent attention's first projection in one kernel: normalises the queries' bottleneck and the
latent, rotates the key, and stores latent and key.

    q_a … │ latent … │ key      a token's row
    norm    norm       RoPE
    result  └ cache ────┘       one program each for a token

`kernels/rms_norm.py`, `kernels/rotary.py` and `kernels/kv_store.py` define the operations.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from stoker_engine.kernels.kv_store import LARGEST
from stoker_engine.kernels.triton.attention.kv_store import fitted, token_scale
from stoker_engine.kernels.triton.attention.rope_and_cache import is_broken_within, largest_within
from stoker_engine.kernels.triton.common.arithmetic import rounded, widened
from stoker_engine.kernels.triton.common.float8 import PLAIN, code_of, stored_bytes
from stoker_engine.kernels.triton.common.gpu_target import GpuTarget
from stoker_engine.kernels.triton.common.kernel_variant import KernelVariant
from stoker_engine.kernels.triton.common.operation import operation


@triton.jit
def _normed(row, weight, at, eps, SIZE: tl.constexpr, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    numbers = widened(tl.load(row + at, mask=at < SIZE, other=0.0))
    normalised = numbers * tl.rsqrt(tl.sum(numbers * numbers, 0) / SIZE + eps)
    if weight.dtype.element_ty != tl.float32:
        normalised = widened(rounded(normalised, DTYPE))
    return rounded(normalised * widened(tl.load(weight + at, mask=at < SIZE, other=0.0)), DTYPE)


@triton.jit
def _mla_rope_and_cache(  # type: ignore[no-untyped-def]
    rows,
    q_weight,
    kv_weight,
    cos,
    sin,
    queries,
    keys,
    scales,
    slot_mapping,
    eps,
    row_token: tl.int64,
    key_block: tl.int64,
    key_slot: tl.int64,
    scale_block: tl.int64,
    scale_slot: tl.int64,
    QUERY: tl.constexpr,
    QUERY_PADDED: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_PADDED: tl.constexpr,
    PAIRS: tl.constexpr,
    PADDED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CODE: tl.constexpr,
    LIMIT: tl.constexpr,
    OF_TOKENS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    to_slot = tl.load(slot_mapping + token)
    if (to_slot < 0) & (tl.program_id(1) == 0):
        return
    DTYPE: tl.constexpr = rows.dtype.element_ty
    row = rows + token * row_token
    if tl.program_id(1) == 1:
        if QUERY > 0:
            of_query = tl.arange(0, QUERY_PADDED)
            normed = _normed(row, q_weight, of_query, eps, QUERY, DTYPE)
            tl.store(queries + token * QUERY + of_query, normed, mask=of_query < QUERY)
    else:
        at, pair = tl.arange(0, LATENT_PADDED), tl.arange(0, PADDED)
        is_pair = pair < PAIRS
        latent = widened(_normed(row + QUERY, kv_weight, at, eps, LATENT, DTYPE))
        first_at = LATENT + (2 * pair if INTERLEAVED else pair)
        second_at = LATENT + (2 * pair + 1 if INTERLEAVED else PAIRS + pair)
        first = widened(tl.load(row + QUERY + first_at, mask=is_pair, other=0.0))
        second = widened(tl.load(row + QUERY + second_at, mask=is_pair, other=0.0))
        c = widened(tl.load(cos + token * PAIRS + pair, mask=is_pair, other=0.0))
        s = widened(tl.load(sin + token * PAIRS + pair, mask=is_pair, other=0.0))
        rotated = widened(rounded(first * c - second * s, DTYPE))
        second = widened(rounded(second * c + first * s, DTYPE))
        block, slot = to_slot // BLOCK_SIZE, to_slot % BLOCK_SIZE
        to = keys + block * key_block + slot * key_slot
        if CODE == 0:
            tl.store(to + at, rounded(latent, keys.dtype.element_ty), mask=at < LATENT)
            tl.store(to + first_at, rounded(rotated, keys.dtype.element_ty), mask=is_pair)
            tl.store(to + second_at, rounded(second, keys.dtype.element_ty), mask=is_pair)
        else:
            of_scale = scales + block * scale_block + slot * scale_slot
            if OF_TOKENS:
                largest = tl.maximum(
                    tl.maximum(largest_within(latent), largest_within(rotated)), largest_within(second)
                )
                broken = is_broken_within(latent) + is_broken_within(rotated) + is_broken_within(second)
                scale = token_scale(largest, broken > 0, LIMIT)
                tl.store(of_scale, scale)
            else:
                scale = tl.load(of_scale)
            tl.store(to + at, fitted(latent, scale, CODE, LIMIT), mask=at < LATENT)
            tl.store(to + first_at, fitted(rotated, scale, CODE, LIMIT), mask=is_pair)
            tl.store(to + second_at, fitted(second, scale, CODE, LIMIT), mask=is_pair)


@operation("stoker::mla_rope_and_cache", mutates_args=("cache", "scales"))
def mla_rope_and_cache(
    rows: torch.Tensor,
    q_weight: torch.Tensor | None,
    kv_weight: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    cache: torch.Tensor,
    scales: torch.Tensor | None,
    scales_of_tokens: bool,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """Normalise the queries' bottlenecks, and store normalised latents and rotated keys.

    Args:
        rows: [tokens, q + latent + 2 × pairs]; q is 0 without a bottleneck.
        q_weight, kv_weight: [q] and [latent], weights of the RMS norms; None if q is 0.
        cos, sin: [tokens, 1, pairs].
        cache: [blocks, block_size, 1, latent + 2 × pairs]; see `attention.backend.KVCache`, also for scales.
        slot_mapping: [tokens] int64; tokens with negative slots are not stored.

    Returns:
        Normalised bottlenecks, [tokens, q].
    """
    tokens, pairs, latent = len(rows), cos.shape[-1], len(kv_weight)
    query = 0 if q_weight is None else len(q_weight)
    assert rows.shape[1] == query + latent + 2 * pairs and cache.shape[2:] == (1, latent + 2 * pairs)
    queries = torch.empty(tokens, query, dtype=rows.dtype, device=rows.device)
    if not tokens:
        return queries
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    stored, code = stored_bytes(cache), code_of(cache.dtype)
    _mla_rope_and_cache[(tokens, 2 if query else 1)](
        rows,
        q_weight,
        kv_weight,
        cos.contiguous(),
        sin.contiguous(),
        queries,
        stored,
        scales,
        slot_mapping,
        eps,
        rows.stride(0),
        *stored.stride()[:2],
        *(scales.stride()[:2] if scales is not None else (0, 0)),
        **_constants(query, latent, pairs, interleaved),
        BLOCK_SIZE=cache.shape[1],
        CODE=code,
        LIMIT=LARGEST[cache.dtype] if code != PLAIN else 0.0,
        OF_TOKENS=scales_of_tokens,
        num_warps=_WARPS,
    )
    return queries


@mla_rope_and_cache.register_fake
def _(
    rows: torch.Tensor,
    q_weight: torch.Tensor | None,
    kv_weight: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    cache: torch.Tensor,
    scales: torch.Tensor | None,
    scales_of_tokens: bool,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    query = 0 if q_weight is None else len(q_weight)
    return torch.empty(len(rows), query, dtype=rows.dtype, device=rows.device)


_WARPS = 4


def _constants(query: int, latent: int, pairs: int, interleaved: bool) -> dict[str, object]:
    return {
        "QUERY": query,
        "QUERY_PADDED": triton.next_power_of_2(max(query, 1)),
        "LATENT": latent,
        "LATENT_PADDED": triton.next_power_of_2(latent),
        "PAIRS": pairs,
        "PADDED": triton.next_power_of_2(pairs),
        "INTERLEAVED": interleaved,
    }


def kernel_variants(gpu: GpuTarget) -> Iterator[KernelVariant]:
    """See `attention.decode.kernel_variants`."""
    plain = dict.fromkeys(("rows", "q_weight", "kv_weight", "cos", "sin", "queries"), "bf16")
    for name, dtype, query in (("bf16", None, 1536), ("e4m3", torch.float8_e4m3fn, 1536), ("no bottleneck", None, 0)):
        pointers = plain | {"keys": "bf16" if dtype is None else "u8", "slot_mapping": "i64"}
        constants = _constants(query, 512, 32, True)
        if query == 0:
            del pointers["q_weight"]
            constants["q_weight"] = None
        if dtype is None:
            constants["scales"] = None
        else:
            pointers["scales"] = "fp32"
        constants |= {
            "BLOCK_SIZE": 16,
            "CODE": PLAIN if dtype is None else code_of(dtype),
            "LIMIT": 0.0 if dtype is None else LARGEST[dtype],
            "OF_TOKENS": False,
        }
        yield KernelVariant.of(
            f"mla_rope_and_cache {name}", _mla_rope_and_cache, pointers, {"eps": "fp32"}, constants, _WARPS
        )
