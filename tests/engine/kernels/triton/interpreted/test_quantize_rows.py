"""Quantization of rows to e4m3 by Triton, alone and after norms and activations: the bits of the single operations,
with rows around tiles, strided rows, every dtype, and rows that hold extreme values.
"""

from __future__ import annotations

import pytest
import torch

from stoker_engine.architectures.activation import Activation, ClampedSwiGLU
from stoker_engine.kernels.bundle import Fp8Kernels, QuantizedRows
from stoker_engine.kernels.fp8_linear import quantize_rows
from stoker_engine.kernels.triton.bundle import TRITON, TRITON_FP8
from stoker_engine.kernels.triton.ops import quantize_rows as quantize_rows_module

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
SIZES = (1, 15, 16, 17, 640, 1023, 1024, 1025, 4096)
ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu", "relu2", ClampedSwiGLU(7.0, 1.702))


def fp8() -> Fp8Kernels:
    assert TRITON_FP8.fp8 is not None
    return TRITON_FP8.fp8


def drawn(rows: int, size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return rows of different magnitudes, strided, in memory that is NaN elsewhere."""
    x = torch.randn(rows, size, generator=torch.Generator().manual_seed(seed + size))
    wide = torch.full((rows, size + 5), torch.nan, dtype=dtype)
    wide[:, :size] = x * 10.0 ** (torch.arange(rows) % 5 - 2).unsqueeze(1)
    return wide[:, :size]


def assert_same(got: QuantizedRows, expected: QuantizedRows) -> None:
    assert got.values.dtype == torch.float8_e4m3fn and got.values.is_contiguous()
    assert torch.equal(got.scales, expected.scales)
    assert torch.equal(got.values.view(torch.uint8), expected.values.view(torch.uint8))


@DTYPES
@pytest.mark.parametrize("size", SIZES)
def test_rows_equal_the_definition(size: int, dtype: torch.dtype) -> None:
    x = drawn(6, size, dtype)
    got = fp8().quantize(x)
    assert_same(got, quantize_rows(x))
    assert_same(fp8().quantize(x[3:4]), QuantizedRows(got.values[3:4], got.scales[3:4]))


def test_tensors_of_more_dimensions_and_no_rows() -> None:
    x = drawn(6, 48, torch.bfloat16).unflatten(0, (2, 3))
    assert_same(fp8().quantize(x), quantize_rows(x))
    values, scales = fp8().quantize(x[:0])
    assert values.shape == (0, 48) and scales.shape == (0, 1)


@DTYPES
@pytest.mark.parametrize("size", [48, 300])
def test_rows_longer_than_a_tile(size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such rows are read twice; the largest element may be in any tile."""
    monkeypatch.setattr(quantize_rows_module, "_LARGEST", 32)
    x = drawn(5, size, dtype)
    for row, at in enumerate((0, 31, 32, size - 1)):
        x[row, at] = 3000
    assert_same(fp8().quantize(x), quantize_rows(x))
    gate_up = drawn(5, 2 * size, dtype, seed=1)
    assert_same(fp8().act_and_mul("silu")(gate_up), quantize_rows(TRITON.act_and_mul("silu")(gate_up)))


@DTYPES
def test_rows_that_hold_extreme_values(dtype: torch.dtype) -> None:
    x = drawn(9, 70, dtype)
    x[0], x[1], x[2] = 0, torch.finfo(dtype).max, torch.finfo(dtype).tiny
    x[3, 5], x[4, 69], x[5, 0] = torch.nan, torch.inf, -torch.inf
    x[6, 1], x[6, 2] = torch.inf, torch.nan
    expected, got = quantize_rows(x), fp8().quantize(x)
    finite = [0, 1, 2, 7, 8]
    assert_same(QuantizedRows(*(each[finite] for each in got)), QuantizedRows(*(each[finite] for each in expected)))
    assert not got.scales[3:7].isfinite().any()


@DTYPES
@pytest.mark.parametrize("act", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("size", [17, 1025])
def test_activations_equal_two_operations(size: int, act: Activation, dtype: torch.dtype) -> None:
    x = drawn(5, 2 * size, dtype)
    assert_same(fp8().act_and_mul(act)(x), quantize_rows(TRITON.act_and_mul(act)(x)))
    if isinstance(act, str):
        assert_same(fp8().activation(act)(x), quantize_rows(TRITON.activation(act)(x)))


@DTYPES
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("size", [16, 33, 640, 1025])
def test_norms_equal_two_operations(size: int, wide: bool, dtype: torch.dtype) -> None:
    x, added = drawn(5, size, dtype), drawn(5, size, dtype, seed=1)
    weight = torch.randn(size, generator=torch.Generator().manual_seed(2)).to(torch.float32 if wide else dtype)
    assert_same(fp8().rms_norm(weight, 1e-5)(x), quantize_rows(TRITON.rms_norm(weight, 1e-5)(x)))
    total, got = fp8().add_rms_norm(weight, 1e-5)(x, added)
    expected_total, expected = TRITON.add_rms_norm(weight, 1e-5)(x, added)
    assert torch.equal(total, expected_total)
    assert_same(got, quantize_rows(expected))
    damaged = x.clone()
    damaged[2, size // 2] = torch.nan
    assert fp8().rms_norm(weight, 1e-5)(damaged).scales.isfinite().flatten().tolist() == [True, True, False, True, True]
