"""The kernel's stored bytes, compared with the definition: odd sizes, strides, scales, and NaN."""

from __future__ import annotations

import random

import pytest
import torch

from stoker_engine.kernels.kv_store import kv_store as defined
from stoker_engine.kernels.triton.attention.kv_store import kv_store

CACHES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
HOSTILE = (float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-40, 448.0, 464.0, 465.0, 57344.0, 3e38, -3e38)


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow(drawn=False)) for seed in range(4, 24))]
)
def test_stored_bytes_equal_the_definition(seed: int) -> None:
    dice, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    dtype, rows_of = CACHES[seed % len(CACHES)], dice.choice([torch.float32, torch.bfloat16, torch.float16])
    heads, size, block_size = dice.choice([1, 2, 5]), dice.choice([1, 8, 20, 64, 80, 576]), dice.choice([1, 3, 16])
    blocks, tokens = 7, dice.choice([0, 1, min(17, 7 * block_size)])
    rows = torch.randn(tokens, heads, size + 3, generator=generator)[..., 3:].to(rows_of)
    if dice.random() < 0.5 and tokens:
        for _ in range(8):
            rows[dice.randrange(tokens), dice.randrange(heads), dice.randrange(size)] = dice.choice(HOSTILE)
    slots = torch.randperm(blocks * block_size, generator=generator)[:tokens]
    eight_bits = dtype.itemsize == 1
    of_tokens = eight_bits and dtype != torch.float8_e5m2 and dice.random() < 0.5
    stored = []
    for store in (kv_store, defined):
        pool = torch.zeros(blocks, 3, block_size, heads, size, dtype=torch.float32).to(dtype)
        cache = pool[:, 1]  # a layer's blocks are separated by other layers
        scales = None
        if of_tokens:
            scales = torch.zeros(blocks, block_size, heads)
        elif eight_bits:
            scales = torch.linspace(0.5, 2, heads).expand(blocks, block_size, heads)
        store(rows, cache, slots, scales, of_tokens)
        stored.append((pool, scales))
    (ours, our_scales), (theirs, their_scales) = stored
    if our_scales is not None:
        torch.testing.assert_close(our_scales, their_scales, rtol=0, atol=0, equal_nan=True)
    is_nan = ours.float().isnan()
    assert torch.equal(is_nan, theirs.float().isnan())
    differs = (ours.float() != theirs.float()) & ~is_nan
    assert not differs.any(), (dtype, rows_of, ours[differs], theirs[differs])
