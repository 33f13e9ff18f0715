"""Products with quantized activations by Triton: matrices and experts compared with float64, with rows around tiles,
odd sizes, and extreme values.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import pytest
import torch

from stoker_engine.architectures.quantization.on_load import FP8_ROWS
from stoker_engine.architectures.stored_formats import GroupFormat
from stoker_engine.kernels.blocks import dequantize
from stoker_engine.kernels.bundle import BlockPanels, BlockStack, Experts, Kernels, QuantizedRows, RowFormat
from stoker_engine.kernels.group_blocks import quantize
from stoker_engine.kernels.reference import REFERENCE, REFERENCE_W8A8
from stoker_engine.kernels.triton.batch_invariant import BATCH_INVARIANT
from stoker_engine.kernels.triton.bundle import TRITON, TRITON_FP8
from stoker_engine.kernels.triton.gemm import int8_linear
from stoker_engine.kernels.w8a8_linear import quantize_rows
from stoker_engine.kernels.w8a8_panels import row_format
from stoker_engine.quant.blocks import Blocks

BF16: Final = torch.bfloat16
BLOCKS: Final = GroupFormat("fp8_e4m3", 128, "bfloat16", quantized_activations=True)
WIDE_BLOCKS: Final = replace(BLOCKS, scale="float32")
INT8: Final = GroupFormat("int8", 0, "bfloat16", quantized_activations=True)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def panels(kernels: object = TRITON_FP8) -> BlockPanels:
    found = kernels.block_panels  # type: ignore[attr-defined]
    assert isinstance(found, BlockPanels)
    return found


def packed(blocks: torch.Tensor, stored: GroupFormat, inner: int) -> torch.Tensor:
    found = blocks.clone()
    fit = panels().fit if found.dim() == 2 else panels().fit_stack
    assert fit is not None and fit(found, stored, inner, BF16)
    panels().pack(found, stored, inner)
    return found


def packed_stack(stack: BlockStack) -> BlockStack:
    assert isinstance(stack.stored, GroupFormat)
    blocks, format = packed(stack.blocks, stack.stored, stack.inner), row_format(stack.stored, stack.inner)
    return replace(stack, blocks=blocks, is_packed=True, row_format=format)


def unscaled(x: QuantizedRows, format: RowFormat, inner: int) -> torch.Tensor:
    return x.values.double() * x.scales.double().repeat_interleave(format.group or inner, dim=1)[:, :inner]


@pytest.mark.parametrize(
    ("stored", "tokens", "outputs", "inner"),
    [
        (BLOCKS, 1, 48, 144),
        (WIDE_BLOCKS, 16, 32, 400),
        (BLOCKS, 17, 80, 144),
        (BLOCKS, 9, 32, 112),  # a shard of one group
        (BLOCKS, 65, 144, 256),
        (WIDE_BLOCKS, 129, 16, 272),
        (INT8, 3, 48, 272),
        (INT8, 33, 80, 144),
        (INT8, 129, 32, 256),
    ],
    ids=str,
)
def test_linear_equals_float64(stored: GroupFormat, tokens: int, outputs: int, inner: int) -> None:
    """Some tokens are of very different magnitude, one is 0, and a row of the matrix has scales of 0."""
    weight = drawn(outputs, inner, seed=1) * 10.0 ** (torch.arange(outputs) % 5 - 2).unsqueeze(1)
    weight[outputs // 2] = 0
    blocks, format = quantize(weight, stored), row_format(stored, inner)
    assert format is not None
    exact_weight = dequantize(blocks, stored, inner, torch.float32).double()
    x = (drawn(tokens, inner) * 10.0 ** (torch.arange(tokens) % 7 - 3).unsqueeze(1)).to(BF16)
    x[tokens // 2] = 0
    bias = drawn(outputs, seed=2).to(BF16) if tokens % 2 else None
    quantized = quantize_rows(x, format)
    exact_x = unscaled(quantized, format, inner)
    added = torch.zeros(outputs).double() if bias is None else bias.double()
    exact, size = exact_x @ exact_weight.T + added, exact_x.abs() @ exact_weight.abs().T + added.abs()
    multiply = panels().linear(packed(blocks, stored, inner), stored, inner, BF16, bias)
    got = multiply(quantized)  # type: ignore[arg-type]
    assert got.dtype == BF16
    assert ((got.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-5 * size).all()
    if tokens < 20:
        assert torch.equal(multiply(x), got)
        assert torch.equal(multiply(x.unsqueeze(1)), got.unsqueeze(1))
    if stored == INT8:  # sums are exact, so all kernels and batches give the same bits
        for kernels in (TRITON, BATCH_INVARIANT, REFERENCE_W8A8):
            other = panels(kernels).linear(packed(blocks, stored, inner), stored, inner, BF16, bias)
            assert torch.equal(other(quantized), got)  # type: ignore[arg-type]
        assert torch.equal(multiply(x[-1:]), got[-1:])


@pytest.mark.parametrize("stored", [BLOCKS, INT8], ids=lambda stored: stored.name)
def test_nan_and_infinity_affect_only_their_row(stored: GroupFormat) -> None:
    blocks = packed(quantize(drawn(32, 256), stored), stored, 256)
    multiply, x = panels().linear(blocks, stored, 256, BF16), drawn(4, 256, seed=1).to(BF16)
    clean = multiply(x)
    for value in (torch.nan, torch.inf, -torch.inf):
        damaged = x.clone()
        damaged[2, 7] = value
        got = multiply(damaged)
        assert not got[2].isfinite().any()
        assert torch.equal(got[[0, 1, 3]], clean[[0, 1, 3]])


def test_no_tokens() -> None:
    for stored in (BLOCKS, INT8):
        blocks = packed(quantize(drawn(32, 256), stored), stored, 256)
        assert panels().linear(blocks, stored, 256, BF16)(drawn(0, 256).to(BF16)).shape == (0, 32)


@pytest.mark.parametrize(
    ("stored", "tokens", "hidden", "size", "with_biases"),
    [
        (BLOCKS, 5, 256, 64, True),
        (WIDE_BLOCKS, 36, 144, 272, False),
        (FP8_ROWS, 1, 144, 48, True),
        (FP8_ROWS, 40, 192, 128, False),
        (INT8, 5, 144, 272, True),
    ],
    ids=str,
)
def test_experts_equal_the_reference(
    stored: GroupFormat, tokens: int, hidden: int, size: int, with_biases: bool
) -> None:
    """One of four experts is not chosen, and another belongs to another rank."""
    up, down = (
        BlockStack(
            torch.stack(
                [quantize(drawn(outputs, inner, seed=seed + each), stored.for_rows(inner)) for each in range(4)]
            ),
            stored.for_rows(inner),
            inner,
            drawn(4, outputs, seed=seed + 9).to(BF16) if with_biases else None,
        )
        for outputs, inner, seed in ((2 * size, hidden, 10), (hidden, size, 20))
    )
    chosen = torch.tensor([[0, 2], [2, 1], [4, 0]]).repeat(tokens // 3 + 1, 1)[:tokens]
    weights, x = drawn(tokens, 2, seed=3).abs(), drawn(tokens, hidden, seed=4).to(BF16)
    stacks = packed_stack(up), packed_stack(down)
    compute = TRITON_FP8.block_experts(*stacks, "silu", BF16)
    got = compute(x, weights, chosen)
    expected = REFERENCE_W8A8.block_experts(*stacks, "silu", BF16)(x, weights, chosen)
    # Activations that are rounded to another bfloat16 may be quantized to another code.
    assert (got - expected).norm() <= 0.01 * expected.norm()
    weight_only = REFERENCE.block_experts(up, down, "silu", BF16)(x, weights, chosen)
    assert (got - weight_only).norm() <= 0.07 * weight_only.norm()
    if tokens > 1:  # a row has the same bits in every batch
        assert torch.equal(compute(x[1:2], weights[1:2], chosen[1:2]), got[1:2])


def test_experts_of_which_one_matrix_is_not_packed() -> None:
    """Rows of 24 elements are multiplied weight-only."""
    up = BlockStack(torch.stack([quantize(drawn(48, 144, seed=each), FP8_ROWS) for each in range(3)]), FP8_ROWS, 144)
    down = BlockStack(torch.stack([quantize(drawn(144, 24, seed=each), FP8_ROWS) for each in range(3)]), FP8_ROWS, 24)
    fit = panels().fit_stack
    assert fit is not None and not fit(down.blocks, FP8_ROWS, 24, BF16)
    chosen, weights = torch.tensor([[0, 2], [2, 1]] * 20), drawn(40, 2, seed=3).abs()
    stacks = packed_stack(up), down
    x = drawn(40, 144, seed=4).to(BF16)
    got = TRITON_FP8.block_experts(*stacks, "silu", BF16)(x, weights, chosen)
    expected = REFERENCE_W8A8.block_experts(*stacks, "silu", BF16)(x, weights, chosen)
    assert (got - expected).norm() <= 0.01 * expected.norm()


@pytest.mark.parametrize(("kernels", "inner", "expected"), [
    (TRITON_FP8, 144, RowFormat.FP8_ROWS),
    (TRITON_FP8, 24, None),  # too narrow to be packed
    (TRITON, 144, None),
])  # fmt: skip
def test_stacks_carry_the_row_format_of_their_matrix(kernels: Kernels, inner: int, expected: RowFormat | None) -> None:
    stacks = list[BlockStack]()

    def block_experts(gate_up: BlockStack, down: BlockStack, *_: object) -> Experts:
        stacks.extend((gate_up, down))
        return lambda x, weights, chosen: x

    kernels = replace(kernels, block_experts=block_experts)
    matrices = [Blocks(FP8_ROWS).create(32, inner, BF16, kernels, count=2) for _ in range(2)]
    for matrix in matrices:
        matrix.blocks.data.zero_()
        matrix.pack()
    matrices[0].experts(matrices[1], "silu")(drawn(1, inner), drawn(1, 2), torch.tensor([[0, 1]]))
    assert [stack.row_format for stack in stacks[-2:]] == [expected] * 2


def test_many_rows_of_int8_are_multiplied_slab_by_slab(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_linear, "SLAB_BYTES", 130 * 4 * 32)  # two slabs of 32 rows, and one of 16
    blocks, bias = packed(quantize(drawn(80, 144), INT8), INT8, 144), drawn(80, seed=2).to(BF16)
    x = quantize_rows(drawn(130, 144, seed=1).to(BF16), RowFormat.INT8_ROWS)
    for each in (bias, None):
        expected = panels(REFERENCE_W8A8).linear(blocks, INT8, 144, BF16, each)(x)  # type: ignore[arg-type]
        assert torch.equal(panels().linear(blocks, INT8, 144, BF16, each)(x), expected)  # type: ignore[arg-type]


def test_other_formats_are_packed_as_before() -> None:
    int4 = GroupFormat("uint4", 32, "float16")
    blocks = quantize(drawn(64, 128), int4)
    for kernels in (TRITON, TRITON_FP8, BATCH_INVARIANT):
        assert panels(kernels).fit(blocks, int4, 128, BF16)
    fp8 = quantize(drawn(64, 256), BLOCKS)
    assert panels(TRITON_FP8).fit(fp8, BLOCKS, 256, BF16)
    assert not panels(TRITON).fit(fp8, BLOCKS, 256, BF16)
    assert not panels(BATCH_INVARIANT).fit(fp8, BLOCKS, 256, BF16)
