"""Values stored in the KV cache by both backends: all values of bfloat16, including NaN and infinity."""

from __future__ import annotations

import math

import pytest
import torch

from stoker_engine.attention.backend import AttentionBackend, AttentionShape
from stoker_engine.attention.cpu import CpuBackend
from stoker_engine.attention.sdpa import SdpaBackend
from stoker_engine.kernels.cpu.library import load

from ..attention.conftest import Sequences, kept, run
from .each_isa import each_isa

SHAPE = AttentionShape(num_heads=2, num_kv_heads=2, head_dim=40, value_head_dim=40, scale=1.0)
QUANTIZED = ["fp8", "fp8_e5m2", "fp8_per_token_head", "int8_per_token_head"]


@pytest.fixture(params=[pytest.param("sdpa", id="sdpa"), *each_isa()])
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    """The reference, and the kernels of each ISA."""
    return SdpaBackend() if request.param == "sdpa" else CpuBackend(load(request.param))


def through(backend: AttentionBackend, kv_cache_dtype: str, values: torch.Tensor) -> torch.Tensor:
    """Store and read `values` [tokens, 2, 40]: each token attends only to itself."""
    sequences = Sequences.random(SHAPE, [1] * len(values), torch.float32, kv_cache_dtype=kv_cache_dtype)
    sequences.values = list(values.unsqueeze(1))
    out = run(backend, sequences, [(index, 0, 1) for index in range(len(values))])
    return torch.cat(out).view_as(values)


@pytest.mark.parametrize("kv_cache_dtype", QUANTIZED)
def test_finite_values_are_rounded_as_by_torch(backend: AttentionBackend, kv_cache_dtype: str) -> None:
    """Rounded like torch's types, saturated and never NaN; values between two codes are ties."""
    bits = torch.arange(1 << 16, dtype=torch.int32)
    finite = (bits << 16).view(torch.float32)
    finite = finite[finite.isfinite() & (finite.abs() < 1e37)]
    ties = finite[finite.abs() < 1e5] * (1 + 2**-9)
    finite = torch.cat([finite, ties])
    if kv_cache_dtype.endswith("_per_token_head"):  # of one size, so that not all but one of a vector become 0
        finite = finite[finite.abs().argsort()]
    values = finite[: len(finite) // 80 * 80].view(-1, 2, 40)
    got, expected = through(backend, kv_cache_dtype, values), kept(values, kv_cache_dtype)
    assert torch.equal(got, expected.float())
    assert got.isfinite().all()


@pytest.mark.parametrize("kv_cache_dtype", QUANTIZED)
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_become_nan_and_affect_no_other_vector(
    backend: AttentionBackend, kv_cache_dtype: str, broken: float
) -> None:
    values = torch.randn(6, 2, 40, generator=torch.Generator().manual_seed(0))
    values[2, 1, 33] = broken
    got = through(backend, kv_cache_dtype, values)
    assert got[2, 1, 33].isnan()
    whole = got.clone()
    whole[2, 1] = 0
    assert whole.isfinite().all(), "other heads and tokens must stay finite"


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_per_token_head", "int8_per_token_head"])
def test_vectors_of_zeros_and_of_extreme_values_are_stored(backend: AttentionBackend, kv_cache_dtype: str) -> None:
    values = torch.zeros(5, 2, 40)
    values[1, 0, 7], values[2, 1, 39], values[3, 0, 0], values[4, :, :] = 1e-45, 1e-38, 3e38, -3e38
    got = through(backend, kv_cache_dtype, values)
    assert torch.equal(got, kept(values, kv_cache_dtype).float())
    assert (got[0] == 0).all()
    torch.testing.assert_close(got[3:], values[3:], rtol=1e-5, atol=0)
