"""Quantization of rows by Triton, alone and after norms and activations: the bits of the single operations,
with rows around tiles, strided rows, every dtype, and rows that hold extreme values.
"""

from __future__ import annotations

import pytest
import torch

from stoker_engine.architectures.activation import Activation, ClampedSwiGLU
from stoker_engine.kernels.bundle import QuantizedRows, RowFormat
from stoker_engine.kernels.triton.bundle import TRITON, TRITON_FP8
from stoker_engine.kernels.triton.ops import quantize_rows as quantize_rows_module
from stoker_engine.kernels.w8a8_linear import quantize_rows

CASES = pytest.mark.parametrize(
    ("format", "dtype"),
    [
        (RowFormat.FP8_ROWS, torch.float32),
        (RowFormat.FP8_ROWS, torch.bfloat16),
        (RowFormat.FP8_ROWS, torch.float16),
        (RowFormat.FP8_GROUPS, torch.bfloat16),
        (RowFormat.INT8_ROWS, torch.float16),
    ],
    ids=str,
)
SIZES = (1, 15, 16, 17, 640, 1023, 1024, 1025, 4096)
ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu", "relu2", ClampedSwiGLU(7.0, 1.702))


def drawn(rows: int, size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return rows of different magnitudes, strided, in memory that is NaN elsewhere."""
    x = torch.randn(rows, size, generator=torch.Generator().manual_seed(seed + size))
    wide = torch.full((rows, size + 5), torch.nan, dtype=dtype)
    wide[:, :size] = x * 10.0 ** (torch.arange(rows) % 5 - 2).unsqueeze(1)
    return wide[:, :size]


def assert_same(got: QuantizedRows, expected: QuantizedRows) -> None:
    assert got.values.dtype == expected.values.dtype and got.values.is_contiguous()
    assert torch.equal(got.scales, expected.scales)
    assert torch.equal(got.values.view(torch.uint8), expected.values.view(torch.uint8))


@CASES
@pytest.mark.parametrize("size", SIZES)
def test_rows_equal_the_definition(size: int, format: RowFormat, dtype: torch.dtype) -> None:
    x, quantize = drawn(6, size, dtype), TRITON_FP8.quantizing[format].quantize
    got = quantize(x)
    assert_same(got, quantize_rows(x, format))
    assert_same(quantize(x[3:4]), QuantizedRows(got.values[3:4], got.scales[3:4]))


@pytest.mark.parametrize("format", RowFormat)
def test_tensors_of_more_dimensions_and_no_rows(format: RowFormat) -> None:
    x, quantize = drawn(6, 48, torch.bfloat16).unflatten(0, (2, 3)), TRITON_FP8.quantizing[format].quantize
    assert_same(quantize(x), quantize_rows(x, format))
    values, scales = quantize(x[:0])
    assert values.shape == (0, 48) and scales.shape == (0, 1)


@CASES
@pytest.mark.parametrize("size", [48, 300])
def test_rows_longer_than_a_tile(
    size: int, format: RowFormat, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows with one scale are read twice; the largest element may be in any tile."""
    monkeypatch.setattr(quantize_rows_module, "_LARGEST", 32)
    kernels = TRITON_FP8.quantizing[format]
    x = drawn(5, size, dtype)
    for row, at in enumerate((0, 31, 32, size - 1)):
        x[row, at] = 3000
    assert_same(kernels.quantize(x), quantize_rows(x, format))
    gate_up = drawn(5, 2 * size, dtype, seed=1)
    assert_same(kernels.act_and_mul("silu")(gate_up), quantize_rows(TRITON.act_and_mul("silu")(gate_up), format))


@CASES
def test_rows_that_hold_extreme_values(format: RowFormat, dtype: torch.dtype) -> None:
    x = drawn(9, 200, dtype)
    x[0], x[1], x[2] = 0, torch.finfo(dtype).max, torch.finfo(dtype).tiny
    x[3, 5], x[4, 69], x[5, 0] = torch.nan, torch.inf, -torch.inf
    x[6, 1], x[6, 2] = torch.inf, torch.nan
    expected, got = quantize_rows(x, format), TRITON_FP8.quantizing[format].quantize(x)
    finite = [0, 1, 2, 7, 8]
    assert_same(QuantizedRows(*(each[finite] for each in got)), QuantizedRows(*(each[finite] for each in expected)))
    assert not got.scales[3:7, 0].isfinite().any()
    if format.group:  # the other groups of these rows are not affected
        assert torch.equal(got.scales[:, 1], expected.scales[:, 1])
        assert torch.equal(got.values[:, 128:].view(torch.uint8), expected.values[:, 128:].view(torch.uint8))


@CASES
@pytest.mark.parametrize("act", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("size", [17, 1025])
def test_activations_equal_two_operations(size: int, act: Activation, format: RowFormat, dtype: torch.dtype) -> None:
    x, kernels = drawn(5, 2 * size, dtype), TRITON_FP8.quantizing[format]
    assert_same(kernels.act_and_mul(act)(x), quantize_rows(TRITON.act_and_mul(act)(x), format))
    if isinstance(act, str):
        assert_same(kernels.activation(act)(x), quantize_rows(TRITON.activation(act)(x), format))


@CASES
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("size", [16, 33, 640, 1025])
def test_norms_equal_two_operations(size: int, wide: bool, format: RowFormat, dtype: torch.dtype) -> None:
    x, added, kernels = drawn(5, size, dtype), drawn(5, size, dtype, seed=1), TRITON_FP8.quantizing[format]
    weight = torch.randn(size, generator=torch.Generator().manual_seed(2)).to(torch.float32 if wide else dtype)
    assert_same(kernels.rms_norm(weight, 1e-5)(x), quantize_rows(TRITON.rms_norm(weight, 1e-5)(x), format))
    total, got = kernels.add_rms_norm(weight, 1e-5)(x, added)
    expected_total, expected = TRITON.add_rms_norm(weight, 1e-5)(x, added)
    assert torch.equal(total, expected_total)
    assert_same(got, quantize_rows(expected, format))
    damaged = x.clone()
    damaged[2, size // 2] = torch.nan
    scales = kernels.rms_norm(weight, 1e-5)(damaged).scales
    assert scales.isfinite().all(1).tolist() == [True, True, False, True, True]
