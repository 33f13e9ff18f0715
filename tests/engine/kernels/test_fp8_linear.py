"""Products in FP8 compared with float64: quantized rows, the packed matrix, and what packing refuses."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Final

import pytest
import torch

from stoker_engine.architectures.quantization.on_load import FP8_ROWS
from stoker_engine.architectures.stored_formats import GroupFormat
from stoker_engine.kernels import select
from stoker_engine.kernels.blocks import block_rows, dequantize
from stoker_engine.kernels.bundle import BlockPanels
from stoker_engine.kernels.fp8_linear import LEAST_SCALE, quantize_rows
from stoker_engine.kernels.fp8_panels import Packed
from stoker_engine.kernels.group_blocks import quantize
from stoker_engine.kernels.reference import REFERENCE, REFERENCE_FP8
from stoker_engine.kernels.select import multiplies_fp8

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BF16: Final = torch.bfloat16


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def panels() -> BlockPanels:
    assert REFERENCE_FP8.block_panels is not None
    return REFERENCE_FP8.block_panels


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inner", [1, 15, 16, 33, 640, 4097])
def test_rows_are_rounded_to_the_nearest_value(inner: int, dtype: torch.dtype) -> None:
    x = (drawn(7, inner, seed=inner) * 10.0 ** torch.arange(-3, 4).unsqueeze(1)).to(dtype)
    values, scales = quantize_rows(x)
    assert values.dtype == torch.float8_e4m3fn and values.shape == x.shape and scales.shape == (7, 1)
    largest = x.double().abs().amax(1, keepdim=True)
    torch.testing.assert_close(scales.double(), largest / 448, rtol=1e-6, atol=0)
    # Half a step: 2⁻⁴ of a normal value, 2⁻¹⁰ in units of the scale for a subnormal one.
    error = (values.double() * scales.double() - x.double()).abs()
    assert (error <= torch.maximum(x.double().abs() * 2**-4, scales.double() * 2**-10) * (1 + 1e-6)).all()
    assert (values.float().abs().amax(1) == 448).all()


def test_extreme_rows() -> None:
    """Rows of zeros stay zeros; rows that hold NaN or infinity get a scale that is not finite."""
    x = drawn(8, 48)
    x[0], x[1], x[2] = 0, torch.finfo(torch.float32).max, 1e-42
    x[3, 5], x[4, 47], x[5, 0] = torch.nan, torch.inf, -torch.inf
    values, scales = quantize_rows(x)
    assert scales[0] == scales[2] == LEAST_SCALE
    assert not values[0].float().any() and not values[2].float().any()
    assert (values[1].float() == 448).all() and scales[1].isfinite()
    assert not scales[3:6].isfinite().any() and scales[6:].isfinite().all()


@pytest.mark.parametrize(
    ("tokens", "outputs", "inner"), [(1, 16, 16), (3, 32, 48), (17, 48, 640), (64, 16, 1040), (5, 304, 32), (0, 16, 16)]
)
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_equals_float64(tokens: int, outputs: int, inner: int, with_bias: bool) -> None:
    weight = drawn(outputs, inner, seed=1) * 10.0 ** (torch.arange(outputs) % 5 - 2).unsqueeze(1)
    blocks = quantize(weight, FP8_ROWS)
    exact_weight = dequantize(blocks, FP8_ROWS, inner, torch.float32).double()
    x, bias = drawn(tokens, inner).to(BF16), drawn(outputs, seed=2).to(BF16) if with_bias else None
    quantized = quantize_rows(x)
    exact_x = quantized.values.double() * quantized.scales.double()
    added = torch.zeros(outputs).double() if bias is None else bias.double()
    exact = exact_x @ exact_weight.T + added
    size = exact_x.abs() @ exact_weight.abs().T + added.abs()
    assert panels().fit(blocks, FP8_ROWS, inner, BF16)
    panels().pack(blocks, FP8_ROWS, inner)
    multiply = panels().linear(blocks, FP8_ROWS, inner, BF16, bias)
    got = multiply(x)
    assert got.dtype == BF16 and got.shape == (tokens, outputs)
    assert ((got.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-5 * size).all()
    assert torch.equal(multiply(quantized), got)  # type: ignore[arg-type]
    assert torch.equal(multiply(x.unsqueeze(1)), got.unsqueeze(1))


def test_nan_and_infinity_affect_only_their_row() -> None:
    blocks = quantize(drawn(32, 64), FP8_ROWS)
    panels().pack(blocks, FP8_ROWS, 64)
    multiply = panels().linear(blocks, FP8_ROWS, 64, BF16)
    x = drawn(4, 64, seed=1).to(BF16)
    clean = multiply(x)
    for value in (torch.nan, torch.inf, -torch.inf):
        damaged = x.clone()
        damaged[2, 7] = value
        got = multiply(damaged)
        assert not got[2].isfinite().any()
        assert torch.equal(got[[0, 1, 3]], clean[[0, 1, 3]])


@pytest.mark.parametrize("inner", [16, 32, 48, 640])
def test_packing_keeps_every_value(inner: int) -> None:
    """Packed rows are those of the unpacked matrix, looked up in any order and more than once."""
    blocks, draw = quantize(drawn(48, inner, seed=inner), FP8_ROWS), random.Random(inner)
    ids = torch.tensor([draw.randrange(48) for _ in range(60)])
    expected = block_rows(blocks, FP8_ROWS, inner, ids, BF16)
    packed = blocks.clone()
    panels().pack(packed, FP8_ROWS, inner)
    assert torch.equal(panels().rows(packed, FP8_ROWS, inner, ids, BF16), expected)
    parts = Packed.of(packed, inner)  # torch's kernel for compute capability 8.9 ignores strides
    assert parts.codes.is_contiguous() and parts.scales.is_contiguous()
    assert parts.codes.storage_offset() % 16 == 0 and parts.scales.storage_offset() % 4 == 0


@pytest.mark.parametrize(
    ("capability", "version", "expected"),
    [
        (None, "2.15.0", False),
        ((8, 0), "2.15.0", False),
        ((8, 9), "2.11.0+cu130", False),
        ((8, 9), "2.12.1", True),
        ((9, 0), "2.11.0+cu130", True),
        ((12, 0), "2.15.0a0+git", True),
    ],
)
def test_fp8_tensor_cores_need_a_gpu_and_a_torch_that_has_kernels_for_them(
    capability: tuple[int, int] | None, version: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object) -> torch.Tensor:
        raise RuntimeError("Rowwise scaling is not currently supported\non this device")

    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(select, "_try_fp8", lambda: None)
    assert multiplies_fp8(capability) is expected
    monkeypatch.setattr(select, "_try_fp8", refuses)
    assert multiplies_fp8(capability) is False


def test_only_matrices_for_fp8_tensor_cores_are_packed() -> None:
    def fits(outputs: int, inner: int, stored: GroupFormat = FP8_ROWS, dtype: torch.dtype = BF16) -> bool:
        blocks = torch.zeros(outputs, stored.row_bytes(inner), dtype=torch.uint8)
        return panels().fit(blocks, stored, inner, dtype)

    assert fits(16, 16) and fits(48, 80) and fits(32, 128, replace(FP8_ROWS, group=128))
    assert not fits(24, 32) and not fits(32, 40) and not fits(1, 16)
    assert not fits(32, 32, dtype=torch.float16) and not fits(32, 32, dtype=torch.float32)
    for stored in (
        replace(FP8_ROWS, fp8_activations=False),
        replace(FP8_ROWS, scale="bfloat16"),
        replace(FP8_ROWS, group=32),
        GroupFormat("int8", 0, "float32"),
    ):
        assert not fits(32, 64, stored)


@pytest.mark.parametrize("act", ["silu", "gelu_pytorch_tanh"])
def test_fused_operations_quantize_the_results_of_single_ones(act: str) -> None:
    fp8 = REFERENCE_FP8.fp8
    assert fp8 is not None
    x, added, weight = drawn(5, 64).to(BF16), drawn(5, 64, seed=1).to(BF16), drawn(64, seed=2).to(BF16)
    total, normed = fp8.add_rms_norm(weight, 1e-5)(x, added)
    expected_total, expected = REFERENCE.add_rms_norm(weight, 1e-5)(x, added)
    assert torch.equal(total, expected_total)
    for got, operand in (
        (normed, expected),
        (fp8.rms_norm(weight, 1e-5)(x), REFERENCE.rms_norm(weight, 1e-5)(x)),
        (fp8.act_and_mul(act)(x), REFERENCE.act_and_mul(act)(x)),
        (fp8.activation(act)(x), REFERENCE.activation(act)(x)),
    ):
        values, scales = quantize_rows(operand)
        assert torch.equal(got.values.view(torch.uint8), values.view(torch.uint8))
        assert torch.equal(got.scales, scales)
