"""Norm, rotary embedding and store in one kernel, compared with the three operations one after another.

Seeded random cases: head sizes, heads per KV head, rotated dimensions and their layout, norms, cache formats, strides,
and NaN.
"""

from __future__ import annotations

import random

import pytest
import torch

from stoker_engine.attention.backend import KVCache
from stoker_engine.kernels.kv_store import dequantized, kv_store
from stoker_engine.kernels.reference import REFERENCE
from stoker_engine.kernels.triton.attention.rope_and_cache import rope_and_cache

CACHES = (None, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
#: Tolerances of a value in the model's dtype.
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def cache_of(dtype: torch.dtype, of_tokens: bool, blocks: int, block_size: int, heads: int, size: int) -> KVCache:
    """Return a layer's part of blocks that are shared with other layers."""
    pool = torch.zeros(blocks, 4, block_size, heads, size).to(dtype)
    scales: tuple[torch.Tensor | None, torch.Tensor | None] = None, None
    if dtype.itemsize == 1:
        shape = blocks, block_size, heads
        scales = (torch.zeros(shape), torch.zeros(shape))
        if not of_tokens:
            each = torch.linspace(0.02, 0.04, heads)
            scales = each.expand(shape), (2 * each).expand(shape)
    return KVCache(pool[:, 1], pool[:, 2], 0, *scales, of_tokens)


@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.slow(drawn=False)) for seed in range(6, 32))]
)
def test_rope_and_cache_equals_separate_operations(seed: int) -> None:
    dice, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    dtype = dice.choice(list(ROUNDING))
    stored = CACHES[seed % len(CACHES)] or dtype
    of_tokens = stored.itemsize == 1 and stored != torch.float8_e5m2 and dice.random() < 0.5
    kv_heads, group, size = dice.choice([1, 2, 3]), dice.choice([1, 2, 7]), dice.choice([8, 20, 64, 80, 96, 128])
    heads, pairs, interleaved = kv_heads * group, dice.choice([0, size // 2, size // 4, 3]), dice.random() < 0.5
    block_size, blocks = dice.choice([1, 3, 16]), 9
    tokens = dice.choice([0, 1, min(13, blocks * block_size)])
    wide = torch.randn(tokens, (heads + 2 * kv_heads) * size + 5, generator=generator).to(dtype)
    if tokens and dice.random() < 0.3:
        wide[0, dice.randrange(heads * size, wide.shape[1] - 5)] = dice.choice([float("nan"), float("inf")])
    qkv = wide[:, : wide.shape[1] - 5].unflatten(1, (-1, size))
    weight_dtype = dice.choice([torch.float32, dtype])
    norms = [torch.randn(size, generator=generator).to(weight_dtype) for _ in range(2)] if dice.random() < 0.6 else None
    slots = torch.randperm(blocks * block_size, generator=generator)[:tokens]
    positions = torch.randint(0, 5000, (tokens,), generator=generator)
    cos, sin = REFERENCE.cos_sin(positions, torch.linspace(1, 1e-3, max(pairs, 1)), 1.0, dtype)
    ours, theirs = (cache_of(stored, of_tokens, blocks, block_size, kv_heads, size) for _ in range(2))

    query, key, value = qkv.clone().split([heads, kv_heads, kv_heads], dim=1)
    if norms is not None:
        query, key = (REFERENCE.rms_norm(w, 1e-6)(x) for w, x in zip(norms, (query, key), strict=True))
    if pairs:
        query, key = (
            REFERENCE.apply_rotary(x.float(), cos.float(), sin.float(), interleaved).to(dtype) for x in (query, key)
        )
    kv_store(key, theirs.key, slots, theirs.key_scales, of_tokens)
    kv_store(value, theirs.value, slots, theirs.value_scales, of_tokens)

    q_weight, k_weight = norms or (None, None)
    rope_and_cache(
        qkv, heads, q_weight, k_weight, 1e-6, cos if pairs else None, sin if pairs else None, interleaved,
        ours.key, ours.value, ours.key_scales, ours.value_scales, of_tokens, slots,
    )  # fmt: skip

    def close(mine: torch.Tensor, right: torch.Tensor, near: float) -> None:
        torch.testing.assert_close(mine.float(), right.float(), rtol=2 * near, atol=2 * near, equal_nan=True)

    close(qkv[:, :heads], query, ROUNDING[dtype])
    # Values are copied, and keys only differ by the rounding of both ways.
    near = {torch.float8_e4m3fn: 2**-3, torch.float8_e5m2: 2**-2, torch.int8: 2**-5}.get(stored, ROUNDING[dtype])
    for part in ("key", "value"):
        a, b = getattr(ours, part), getattr(theirs, part)
        a_scales, b_scales = getattr(ours, f"{part}_scales"), getattr(theirs, f"{part}_scales")
        if part == "value":
            is_nan = b.float().isnan()
            assert torch.equal(a.float().isnan(), is_nan)
            bytes_differ = a.contiguous().view(torch.uint8) != b.contiguous().view(torch.uint8)
            assert not (bytes_differ.view(*a.shape, -1).any(-1) & ~is_nan).any()
        if a_scales is None:
            close(a, b, near)
        else:
            close(a_scales, b_scales, ROUNDING[dtype])
            close(dequantized(a, a_scales), dequantized(b, b_scales), near)


def test_a_row_has_the_same_bits_alone() -> None:
    generator = torch.Generator().manual_seed(5)
    qkv = torch.randn(7, 4 + 2 * 2, 64, generator=generator).bfloat16()
    weight = torch.randn(64, generator=generator)
    cos, sin = REFERENCE.cos_sin(torch.arange(7) * 11, torch.linspace(1, 1e-3, 32), 1.0, torch.bfloat16)
    found = []
    for batches in ([range(7)], [[token] for token in range(7)]):
        cache, rows = cache_of(torch.bfloat16, False, 3, 4, 2, 64), qkv.clone()
        for batch in map(list, batches):
            part = rows[batch]
            rope_and_cache(
                part, 4, weight, weight, 1e-6, cos[batch], sin[batch], False, cache.key, cache.value, None, None,
                False, torch.tensor(batch) + 2,
            )  # fmt: skip
            rows[batch] = part
        found.append((rows[:, :4], cache.key, cache.value))
    for together, alone in zip(*found, strict=True):
        assert torch.equal(together, alone)
