"""Windows, tiles, blocks and chunks with unaligned ends: only visible keys affect a query's result.

Memory outside of a sequence is NaN or inaccessible (`guarded_cache`), so that stray reads show.
"""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from stoker_engine.attention.backend import AttentionBackend, AttentionShape
from stoker_engine.attention.cpu import CpuBackend
from stoker_engine.attention.sdpa import SdpaBackend
from stoker_engine.kernels.cpu.library import library

from .conftest import Sequences, run

SHAPE = AttentionShape(num_heads=6, num_kv_heads=2, head_dim=32, value_head_dim=16, scale=0.2)
#: Around the kernel's tiles (64 or 128 keys) and splits (512), and around blocks.
WINDOWS = [1, 2, 15, 16, 17, 20, 63, 64, 65, 100, 127, 128, 129, 200, 511, 512, 1000, 1024, 1100]
EXACT = {torch.float32: 3e-6, torch.bfloat16: 1.6e-2}


@pytest.fixture(params=["native", "sdpa"])
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    if request.param == "sdpa":
        return SdpaBackend()
    kernels = library()
    if kernels is None:
        pytest.skip("there are no CPU kernels here")
    return CpuBackend(kernels)


def cut(rng: random.Random, lengths: list[int]) -> list[list[tuple[int, int, int]]]:
    """Return steps of (sequence, start, end) that compute all sequences, in chunks of random sizes."""
    done, steps = [0] * len(lengths), []
    while any(at < length for at, length in zip(done, lengths, strict=True)):
        spans = []
        for sequence, (at, length) in enumerate(zip(done, lengths, strict=True)):
            if at < length:
                # Large chunks, so that steps are few; the last tokens may come one by one.
                remaining = length - at
                size = (
                    1
                    if remaining <= 2
                    else min(remaining - rng.randrange(3), rng.choice([1, 3, 63, 64, 65, 300, 1024, remaining]))
                )
                spans.append((sequence, at, at + max(1, size)))
        for sequence, _, end in spans:
            done[sequence] = end
        steps.append(sorted(spans, key=lambda span: span[2] - span[1] > 1))
    return steps


@pytest.mark.parametrize("dtype", EXACT, ids=str)
@pytest.mark.parametrize("window", WINDOWS)
def test_window_attention_sees_only_the_keys_of_the_window(
    backend: AttentionBackend, window: int, dtype: torch.dtype
) -> None:
    rng = random.Random(window)
    block_size = rng.choice([4, 16, 16, 24, 64, 80])
    near = [window, 64, 128, block_size, window + 64, window + block_size, 2 * window]
    lengths = [max(1, rng.choice(near) + rng.randint(-2, 2)) for _ in range(4)] + [rng.randrange(window, 1400)]
    shape = dataclasses.replace(SHAPE, sliding_window=window, logits_soft_cap=rng.choice([None, 30.0]))
    sequences = Sequences.random(shape, lengths, dtype, seed=window, block_size=block_size)
    for index, rows in enumerate(run(backend, sequences, *cut(rng, lengths))):
        torch.testing.assert_close(rows.double(), sequences.expected(index), rtol=EXACT[dtype], atol=EXACT[dtype])


@pytest.mark.parametrize("window", [None, 37, 64])
@pytest.mark.parametrize("num_kv_heads", [6, 2])  # the kernel's rows are queries, or queries and heads
@pytest.mark.parametrize(
    "dtype,kv_cache_dtype",
    [(torch.float32, "auto"), (torch.bfloat16, "auto"), (torch.bfloat16, "fp8_per_token_head"),
     (torch.float32, "int8_per_token_head")],
)  # fmt: skip
def test_nan_tokens_affect_exactly_the_rows_that_see_them(
    num_kv_heads: int, window: int | None, dtype: torch.dtype, kv_cache_dtype: str
) -> None:
    """A token with NaN key and value spoils exactly the rows that see it."""
    kernels = library()
    if kernels is None:
        pytest.skip("there are no CPU kernels here")
    shape = dataclasses.replace(SHAPE, num_kv_heads=num_kv_heads, sliding_window=window)
    length = 300
    clean = Sequences.random(shape, [length], dtype, kv_cache_dtype=kv_cache_dtype)
    [expected] = run(CpuBackend(kernels), clean, [(0, 0, length)])
    for spoiled in (0, 21, 63, 64, 150, 299):
        sequences = Sequences.random(shape, [length], dtype, kv_cache_dtype=kv_cache_dtype)
        sequences.keys[0][spoiled] = sequences.values[0][spoiled] = torch.nan
        [rows] = run(CpuBackend(kernels), sequences, [(0, 0, length)])
        position = torch.arange(length)
        sees = position >= spoiled
        if window is not None:
            sees &= position < spoiled + window
        assert torch.equal(rows[~sees], expected[~sees])
        assert rows[sees].isnan().all()


@pytest.mark.parametrize("dtype", EXACT, ids=str)
def test_nan_in_all_keys_of_a_tile_affects_all_rows_that_see_it(dtype: torch.dtype) -> None:
    """These rows also have finite scores from other tiles, before or after it."""
    kernels = library()
    if kernels is None:
        pytest.skip("there are no CPU kernels here")
    sequences = Sequences.random(SHAPE, [300], dtype)
    sequences.keys[0][64:128] = torch.nan
    [rows] = run(CpuBackend(kernels), sequences, [(0, 0, 300)])
    assert rows[:64].isfinite().all() and rows[64:].isnan().all()
    sequences = Sequences.random(SHAPE, [300], dtype)
    sequences.keys[0][:64] = torch.nan
    [rows] = run(CpuBackend(kernels), sequences, [(0, 0, 300)])
    assert rows.isnan().all()
