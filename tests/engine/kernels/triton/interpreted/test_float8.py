"""8-bit floats by integer operations, compared with torch's types: every code, and values around every tie."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from stoker_engine.kernels.triton.common.float8 import E4M3, E5M2, INT8, decode, encode

from .conftest import DEVICE

DTYPES = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2, INT8: torch.int8}


@triton.jit
def _decode(stored, numbers, N: tl.constexpr, CODE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, N)
    tl.store(numbers + at, decode(tl.load(stored + at), CODE, tl.float32))


@triton.jit
def _encode(numbers, stored, N: tl.constexpr, CODE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, N)
    tl.store(stored + at, encode(tl.load(numbers + at), CODE))


@pytest.mark.parametrize("code", DTYPES)
def test_every_code_decodes_as_by_torch(code: int) -> None:
    stored = torch.arange(256).to(torch.uint8)
    there = torch.empty(256, device=DEVICE)
    _decode[(1,)](stored.to(DEVICE), there, 256, code)
    numbers = there.cpu()
    expected = stored.view(DTYPES[code]).float()
    if code == E5M2:
        numbers, expected = numbers[expected.isfinite()], expected[expected.isfinite()]
    assert torch.equal(numbers.view(torch.int32), expected.view(torch.int32)) or torch.allclose(
        numbers, expected, rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("code", DTYPES)
def test_encode_rounds_to_nearest_and_ties_to_even(code: int) -> None:
    codes = torch.arange(256).to(torch.uint8).view(DTYPES[code]).float()
    there = codes[codes.isfinite()].sort().values
    middles = (there[1:] + there[:-1]) / 2
    beside = [torch.nextafter(each, torch.tensor(way)) for each in (there, middles) for way in (-1e30, 1e30)]
    largest = there.max().item()
    random = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * largest / 4
    numbers = torch.cat([there, middles, *beside, random, random / 1000, random * 1e-30]).clamp(-largest, largest)
    if code != INT8:
        numbers = torch.cat([numbers, torch.tensor([float("nan")])])
    size = triton.next_power_of_2(len(numbers))
    numbers = torch.nn.functional.pad(numbers, (0, size - len(numbers)))
    encoded = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    _encode[(1,)](numbers.to(DEVICE), encoded, size, code)
    stored = encoded.cpu()
    expected = (numbers.round() if code == INT8 else numbers).to(DTYPES[code])
    got = stored.view(DTYPES[code])
    same = (got.float() == expected.float()) | (got.float().isnan() & expected.float().isnan())
    assert same.all(), (numbers[~same], got[~same], expected[~same])
    assert torch.equal(got.float().signbit()[~numbers.isnan()], expected.float().signbit()[~numbers.isnan()])
