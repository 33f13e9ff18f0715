"""Latent attention's fused kernels, compared with separate operations: odd sizes, both layouts, all cache formats, and
queries with and without a bottleneck.
"""

from __future__ import annotations

import random

import pytest
import torch

from stoker_engine.kernels.kv_store import dequantized, kv_store
from stoker_engine.kernels.reference import REFERENCE
from stoker_engine.kernels.triton.attention.mla_rope_and_cache import mla_rope_and_cache
from stoker_engine.kernels.triton.bundle import TRITON

ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
CACHES = (None, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow(drawn=False)) for seed in range(4, 24))]
)
def test_mla_rope_and_cache_equals_separate_operations(seed: int) -> None:
    dice, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    dtype = dice.choice(list(ROUNDING))
    stored = CACHES[seed % len(CACHES)] or dtype
    of_tokens = stored.itemsize == 1 and stored != torch.float8_e5m2 and dice.random() < 0.5
    queried, latent, pairs = dice.choice([0, 24, 192]), dice.choice([16, 40, 512]), dice.choice([1, 4, 32])
    block_size, blocks, interleaved = dice.choice([1, 3, 16]), 9, dice.random() < 0.5
    tokens = dice.choice([0, 1, min(11, blocks * block_size)])
    size = latent + 2 * pairs
    rows = torch.randn(tokens, queried + size + 3, generator=generator).to(dtype)[:, 3:]
    if tokens and dice.random() < 0.3:
        rows[0, dice.randrange(rows.shape[1])] = dice.choice([float("nan"), float("inf")])
    q_weight = torch.randn(queried, generator=generator).to(dtype) if queried else None
    kv_weight = torch.randn(latent, generator=generator).to(dtype)
    slots = torch.randperm(blocks * block_size, generator=generator)[:tokens]
    positions = torch.randint(0, 5000, (tokens,), generator=generator)
    cos, sin = REFERENCE.cos_sin(positions, torch.linspace(1, 1e-3, pairs), 1.0, dtype)
    caches, scales = [], []
    for _ in range(2):
        caches.append(torch.zeros(blocks, 2, block_size, 1, size).to(stored)[:, 1])
        shape = blocks, block_size, 1
        scales.append(None if stored.itemsize > 1 else torch.full(shape, 0.0 if of_tokens else 0.03))

    found = mla_rope_and_cache(
        rows, q_weight, kv_weight, 1e-6, cos, sin, interleaved, caches[0], scales[0], of_tokens, slots
    )

    query, inner, key = rows.split([queried, latent, 2 * pairs], dim=1)
    rotated = REFERENCE.apply_rotary(key.unsqueeze(1).float(), cos.float(), sin.float(), interleaved).to(dtype)
    whole = torch.cat((REFERENCE.rms_norm(kv_weight, 1e-6)(inner).unsqueeze(1), rotated), dim=-1)
    kv_store(whole, caches[1], slots, scales[1], of_tokens)
    exact = query if q_weight is None else REFERENCE.rms_norm(q_weight, 1e-6)(query)
    near = 2 * ROUNDING[dtype]
    torch.testing.assert_close(found, exact, rtol=near, atol=near, equal_nan=True)
    ours, theirs = caches
    if scales[0] is None or scales[1] is None:
        torch.testing.assert_close(ours, theirs, rtol=near, atol=near, equal_nan=True)
        return
    torch.testing.assert_close(scales[0], scales[1], rtol=near, atol=near, equal_nan=True)
    step = {torch.float8_e4m3fn: 2**-3, torch.float8_e5m2: 2**-2, torch.int8: 2**-5}[stored]
    meant = [dequantized(cache, scale) for cache, scale in ((ours, scales[0]), (theirs, scales[1]))]
    torch.testing.assert_close(*meant, rtol=2 * step, atol=2 * step, equal_nan=True)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("heads", "size", "pairs"), [(1, 1, 1), (3, 20, 3), (5, 512, 32), (2, 64, 7)])
def test_concat_rotated_equals_the_reference(
    heads: int, size: int, pairs: int, interleaved: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(size)
    cos, sin = REFERENCE.cos_sin(torch.tensor([0, 1, 5000]), torch.linspace(1, 1e-4, pairs), 1.0, dtype)
    x = torch.randn(heads, 3, size, generator=generator).to(dtype).transpose(0, 1)
    rotated = torch.randn(3, heads, 2 * pairs + 5, generator=generator).to(dtype)[..., 5:]
    for tokens in (3, 0):
        arguments = x[:tokens], rotated[:tokens], cos[:tokens], sin[:tokens]
        joined = TRITON.concat_rotated(*arguments, interleaved)
        exact = REFERENCE.concat_rotated(*(each.float() for each in arguments), interleaved)
        assert joined.dtype == dtype and joined.is_contiguous()
        assert torch.equal(joined[..., :size], arguments[0])
        torch.testing.assert_close(joined.float(), exact, rtol=ROUNDING[dtype], atol=ROUNDING[dtype])


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_batched_linear_equals_the_reference(tokens: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    weight = torch.randn(3, 7, 12, generator=generator)
    x = torch.randn(3, tokens, 12, generator=generator).transpose(0, 1)
    found = TRITON.batched_linear(weight)(x)
    assert found.is_contiguous()
    torch.testing.assert_close(found, REFERENCE.batched_linear(weight)(x))
