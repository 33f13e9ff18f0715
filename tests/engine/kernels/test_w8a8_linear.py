"""Products with quantized activations compared with float64: quantized rows, the packed matrix, and what packing
refuses."""

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
from stoker_engine.kernels.bundle import BlockPanels, BlockStack, RowFormat
from stoker_engine.kernels.group_blocks import quantize
from stoker_engine.kernels.reference import REFERENCE, REFERENCE_W8A8
from stoker_engine.kernels.select import multiplies_fp8
from stoker_engine.kernels.w8a8_linear import LARGEST, LEAST_SCALE, quantize_rows
from stoker_engine.kernels.w8a8_panels import Packed, row_format

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BF16: Final = torch.bfloat16
#: Stored formats, and the inner dimensions for which they are multiplied with each format of activations.
BLOCKS: Final = GroupFormat("fp8_e4m3", 128, "bfloat16", quantized_activations=True)
INT8: Final = GroupFormat("int8", 0, "bfloat16", quantized_activations=True)
FORMATS: Final = (FP8_ROWS, BLOCKS, INT8)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def panels() -> BlockPanels:
    assert REFERENCE_W8A8.block_panels is not None
    return REFERENCE_W8A8.block_panels


def by_group(scales: torch.Tensor, format: RowFormat, inner: int) -> torch.Tensor:
    """Return the scale of each element."""
    return scales.double().repeat_interleave(format.group or inner, dim=1)[:, :inner]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", RowFormat)
@pytest.mark.parametrize("inner", [1, 15, 128, 129, 640, 4097])
def test_rows_are_rounded_to_the_nearest_value(inner: int, format: RowFormat, dtype: torch.dtype) -> None:
    x = (drawn(7, inner, seed=inner) * 10.0 ** torch.arange(-3, 4).unsqueeze(1)).to(dtype)
    values, scales = quantize_rows(x, format)
    assert values.dtype == format.dtype and values.shape == x.shape
    assert scales.shape == (7, format.groups(inner)) and values.is_contiguous()
    scale, exact = by_group(scales, format, inner), x.double()
    for first in range(0, inner, format.group or inner):
        columns = slice(first, first + (format.group or inner))
        largest = exact[:, columns].abs().amax(1) / LARGEST[format.dtype]
        torch.testing.assert_close(scale[:, first], largest, rtol=1e-6, atol=0)
        assert (values[:, columns].float().abs().amax(1) == LARGEST[format.dtype]).all()
    error = (values.double() * scale - exact).abs()
    if format.dtype == torch.int8:
        assert (error <= 0.5 * scale * (1 + 1e-4)).all()
    else:  # half a step: 2⁻⁴ of a normal value, 2⁻¹⁰ in units of the scale for a subnormal one
        assert (error <= torch.maximum(exact.abs() * 2**-4, scale * 2**-10) * (1 + 1e-6)).all()


@pytest.mark.parametrize("format", RowFormat)
def test_extreme_rows(format: RowFormat) -> None:
    """Rows of zeros stay zeros; groups that hold NaN or infinity get a scale that is not finite."""
    x = drawn(8, 148)
    x[0], x[1], x[2] = 0, torch.finfo(torch.float32).max, 1e-42
    x[3, 5], x[4, 47], x[5, 0] = torch.nan, torch.inf, -torch.inf
    values, scales = quantize_rows(x, format)
    assert (scales[0] == LEAST_SCALE).all() and (scales[2] == LEAST_SCALE).all()
    assert not values[0].float().any() and not values[2].float().any()
    assert (values[1].float() == LARGEST[format.dtype]).all() and scales[1].isfinite().all()
    assert not scales[3:6, 0].isfinite().any() and scales[6:].isfinite().all()
    assert scales[3:6, 1:].isfinite().all()


@pytest.mark.parametrize("stored", FORMATS, ids=lambda stored: stored.name)
@pytest.mark.parametrize(
    ("tokens", "outputs", "inner"),
    [(1, 16, 16), (3, 32, 48), (17, 48, 640), (64, 16, 1040), (5, 304, 144), (33, 16, 256), (0, 16, 16)],
)
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_equals_float64(stored: GroupFormat, tokens: int, outputs: int, inner: int, with_bias: bool) -> None:
    stored = stored.for_rows(inner)
    weight = drawn(outputs, inner, seed=1) * 10.0 ** (torch.arange(outputs) % 5 - 2).unsqueeze(1)
    blocks, format = quantize(weight, stored), row_format(stored, inner)
    assert format is not None
    exact_weight = dequantize(blocks, stored, inner, torch.float32).double()
    x, bias = drawn(tokens, inner).to(BF16), drawn(outputs, seed=2).to(BF16) if with_bias else None
    quantized = quantize_rows(x, format)
    exact_x = quantized.values.double() * by_group(quantized.scales, format, inner)
    added = torch.zeros(outputs).double() if bias is None else bias.double()
    exact = exact_x @ exact_weight.T + added
    size = exact_x.abs() @ exact_weight.abs().T + added.abs()
    assert panels().fit(blocks, stored, inner, BF16)
    panels().pack(blocks, stored, inner)
    multiply = panels().linear(blocks, stored, inner, BF16, bias)
    got = multiply(x)
    assert got.dtype == BF16 and got.shape == (tokens, outputs)
    assert ((got.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-5 * size).all()
    assert torch.equal(multiply(quantized), got)  # type: ignore[arg-type]
    assert torch.equal(multiply(x.unsqueeze(1)), got.unsqueeze(1))


@pytest.mark.parametrize("stored", FORMATS, ids=lambda stored: stored.name)
def test_nan_and_infinity_affect_only_their_row(stored: GroupFormat) -> None:
    blocks = quantize(drawn(32, 256), stored)
    panels().pack(blocks, stored, 256)
    multiply = panels().linear(blocks, stored, 256, BF16)
    x = drawn(4, 256, seed=1).to(BF16)
    clean = multiply(x)
    for value in (torch.nan, torch.inf, -torch.inf):
        damaged = x.clone()
        damaged[2, 7] = value
        got = multiply(damaged)
        assert not got[2].isfinite().any()
        assert torch.equal(got[[0, 1, 3]], clean[[0, 1, 3]])


@pytest.mark.parametrize("stored", FORMATS, ids=lambda stored: stored.name)
@pytest.mark.parametrize("inner", [16, 48, 144, 640])
def test_packing_keeps_every_value(stored: GroupFormat, inner: int) -> None:
    """Packed rows are those of the unpacked matrix, looked up in any order and more than once."""
    stored = stored.for_rows(inner)
    blocks, draw = quantize(drawn(48, inner, seed=inner), stored), random.Random(inner)
    ids = torch.tensor([draw.randrange(48) for _ in range(60)])
    expected = block_rows(blocks, stored, inner, ids, BF16)
    packed = blocks.clone()
    panels().pack(packed, stored, inner)
    assert torch.equal(panels().rows(packed, stored, inner, ids, BF16), expected)
    parts = Packed.of(packed, stored, inner)  # torch's kernel for compute capability 8.9 ignores strides
    assert parts.codes.is_contiguous() and parts.scales.is_contiguous()
    assert parts.codes.storage_offset() % 16 == 0 and parts.scales.storage_offset() % 4 == 0


@pytest.mark.parametrize("stored", FORMATS, ids=lambda stored: stored.name)
def test_packed_stacks_multiply_like_their_matrices(stored: GroupFormat) -> None:
    """Two of three experts are chosen for each token; each has biases."""
    hidden, size = 192, 256
    chosen, weights = torch.tensor([[0, 2], [2, 1], [1, 0], [2, 0]]), drawn(4, 2, seed=3).abs()
    gate_up, down = (
        BlockStack(
            torch.stack([quantize(drawn(outputs, inner, seed=seed + each), stored) for each in range(3)]),
            stored,
            inner,
            drawn(3, outputs, seed=seed + 9).to(BF16),
        )
        for outputs, inner, seed in ((2 * size, hidden, 10), (hidden, size, 20))
    )
    x = drawn(4, hidden, seed=4).to(BF16)
    exact = REFERENCE.block_experts(gate_up, down, "silu", BF16)(x, weights, chosen)
    for stack in (gate_up, down):
        assert panels().fit_stack is not None and panels().fit_stack(stack.blocks, stored, stack.inner, BF16)  # type: ignore[misc]
        panels().pack(stack.blocks, stored, stack.inner)
    up_packed, down_packed = replace(gate_up, is_packed=True), replace(down, is_packed=True)
    got = REFERENCE_W8A8.block_experts(up_packed, down_packed, "silu", BF16)(x, weights, chosen)
    assert (got - exact).norm() <= 0.06 * exact.norm()


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


def test_only_matrices_for_quantized_activations_are_packed() -> None:
    def fits(outputs: int, inner: int, stored: GroupFormat = FP8_ROWS, dtype: torch.dtype = BF16) -> bool:
        blocks = torch.zeros(outputs, stored.row_bytes(inner), dtype=torch.uint8)
        return panels().fit(blocks, stored, inner, dtype)

    assert fits(16, 16) and fits(48, 80) and fits(32, 128, replace(FP8_ROWS, group=128))
    assert fits(48, 144, BLOCKS) and fits(48, 144, INT8) and fits(48, 144, INT8, torch.float16)
    for stored in FORMATS:
        assert not fits(24, 160, stored) and not fits(32, 136, stored) and not fits(1, 160, stored)
        assert not fits(32, 160, stored, torch.float32)
    assert not fits(32, 32, dtype=torch.float16) and not fits(32, 160, BLOCKS, torch.float16)
    for stored in (
        *(replace(each, quantized_activations=False) for each in FORMATS),
        replace(FP8_ROWS, scale="bfloat16"),
        replace(FP8_ROWS, group=32),
        replace(BLOCKS, group=64),
        replace(BLOCKS, scale="e8m0"),
        replace(INT8, group=128),
    ):
        assert not fits(32, 256, stored)


@pytest.mark.parametrize("format", RowFormat)
@pytest.mark.parametrize("act", ["silu", "gelu_pytorch_tanh"])
def test_fused_operations_quantize_the_results_of_single_ones(act: str, format: RowFormat) -> None:
    kernels = REFERENCE_W8A8.quantizing[format]
    x, added, weight = drawn(5, 192).to(BF16), drawn(5, 192, seed=1).to(BF16), drawn(192, seed=2).to(BF16)
    total, normed = kernels.add_rms_norm(weight, 1e-5)(x, added)
    expected_total, expected = REFERENCE.add_rms_norm(weight, 1e-5)(x, added)
    assert torch.equal(total, expected_total)
    for got, operand in (
        (normed, expected),
        (kernels.rms_norm(weight, 1e-5)(x), REFERENCE.rms_norm(weight, 1e-5)(x)),
        (kernels.act_and_mul(act)(x), REFERENCE.act_and_mul(act)(x)),
        (kernels.activation(act)(x), REFERENCE.activation(act)(x)),
    ):
        values, scales = quantize_rows(operand, format)
        assert torch.equal(got.values.view(torch.uint8), values.view(torch.uint8))
        assert torch.equal(got.scales, scales)
