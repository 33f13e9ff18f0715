"""Experts packed into tiles of words, compared with torch in float64 on dequantized values."""

from __future__ import annotations

import pytest
import torch

from stoker_engine.architectures.stored_formats import GGUF_FORMATS, GroupFormat, StoredFormat
from stoker_engine.kernels.blocks import dequantize
from stoker_engine.kernels.triton.batch_invariant import BATCH_INVARIANT
from stoker_engine.kernels.triton.bundle import TRITON, TRITON_FP8
from stoker_engine.kernels.triton.quant import pack
from stoker_engine.quant.blocks import BlockMatrix, Blocks

from .test_block_experts import NEAR
from .test_experts import draw_chosen, unwritten_is_nan
from .test_packed_linear import random_matrix

__all__ = ["unwritten_is_nan"]

INT4 = GroupFormat("uint4", 32, "float16", zero=True)
FP8 = GroupFormat("fp8_e4m3", 64, "bfloat16")
#: Formats of gate and up projections and of down projections, hidden size, inner size, and tokens. Widths of 8 and 16
#: words, and matrices of which only one is packed.
CASES: list[tuple[StoredFormat, StoredFormat, int, int, int]] = [
    (GroupFormat("fp4", 32, "e8m0"), GroupFormat("fp4", 32, "e8m0"), 192, 64, 7),
    (GGUF_FORMATS["Q4_K"], GGUF_FORMATS["Q8_0"], 256, 64, 3),
    (INT4, INT4, 128, 64, 40),
    (GroupFormat("int8", 32, "float16"), GroupFormat("int8", 0, "float32"), 64, 96, 1),
    (GGUF_FORMATS["Q5_1"], GGUF_FORMATS["Q5_0"], 64, 64, 17),
    (GGUF_FORMATS["MXFP4"], GGUF_FORMATS["Q8_0"], 64, 32, 0),
    (GroupFormat("fp4", 16, "fp8_e4m3", row_scale=True), FP8, 64, 64, 5),
    (INT4, INT4, 96, 64, 5),
]


def stack(stored: StoredFormat, outputs: int, inner: int, dtype: torch.dtype, seed: int) -> BlockMatrix:
    matrix = Blocks(stored).create(outputs, inner, dtype, TRITON, count=3)
    for expert in range(3):
        matrix.blocks.data[expert] = random_matrix(stored, outputs, inner, seed + expert)
    return matrix


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].name}, {case[1].name}, {case[4]}")
def test_packed_experts_equal_float64(
    case: tuple[StoredFormat, StoredFormat, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    *formats, hidden, size, tokens = case
    dtype = torch.bfloat16 if tokens % 2 else torch.float32
    monkeypatch.setattr(pack, "_ELEMENTS", 2 * (2 * size) * hidden)  # two experts at a time, or some rows of one
    gate_up, down = stack(formats[0], 2 * size, hidden, dtype, 1), stack(formats[1], hidden, size, dtype, 11)
    first, second = (dequantize(each.blocks.data, each.stored, each.inner, dtype).double() for each in (gate_up, down))
    generator = torch.Generator().manual_seed(tokens)
    biases, down_biases = (torch.randn(3, n, generator=generator).to(dtype) for n in (2 * size, hidden))
    x = (torch.randn(tokens, hidden, generator=generator) / first.abs().max().float().clamp_min(1.0)).to(dtype)
    weights, chosen = torch.rand(tokens, 2, generator=generator), draw_chosen(tokens, 2, 4, tokens)
    operation = gate_up.experts(down, "silu", biases, down_biases)
    of_blocks = operation(x, weights, chosen)
    for each in (gate_up, down):
        each.pack()
    assert gate_up.is_packed == (hidden % 64 == 0)
    assert down.is_packed == (formats[1] != FP8 and hidden % 64 == 0)
    got = operation(x, weights, chosen)
    expected, size_of_sums = (torch.zeros(tokens, hidden, dtype=torch.float64) for _ in range(2))
    for token, row in enumerate(chosen.tolist()):
        for index, expert in enumerate(row):
            if expert < 3:  # another rank's
                gate, up = (first[expert] @ x[token].double() + biases[expert].double()).chunk(2)
                inner, weight = torch.nn.functional.silu(gate) * up, weights[token, index].double()
                expected[token] += weight * (second[expert] @ inner + down_biases[expert].double())
                size_of_sums[token] += weight * (second[expert].abs() @ inner.abs() + 1)
    for result in (got, of_blocks):
        error = ((result.double() - expected).abs() / size_of_sums.clamp_min(1e-30)).max() if tokens else 0.0
        assert error <= NEAR[dtype]


def test_a_token_of_packed_experts_has_the_same_bits_in_every_batch(batch_invariant_matmul: None) -> None:
    gate_up, down = stack(INT4, 128, 64, torch.bfloat16, 1), stack(INT4, 64, 64, torch.bfloat16, 11)
    operation = gate_up.experts(down, "silu")
    gate_up.pack()
    down.pack()
    generator = torch.Generator().manual_seed(1)
    x, weights = torch.randn(70, 64, generator=generator).bfloat16(), torch.rand(70, 2, generator=generator)
    chosen = draw_chosen(70, 2, 3, 1)
    many = operation(x, weights, chosen)
    for first, last in ((0, 1), (69, 70), (5, 40)):
        assert torch.equal(operation(x[first:last], weights[first:last], chosen[first:last]), many[first:last])


def test_all_bundles_pack_experts() -> None:
    for kernels in (TRITON, TRITON_FP8, BATCH_INVARIANT):
        matrix = Blocks(INT4).create(64, 128, torch.bfloat16, kernels, count=2)
        matrix.blocks.data.zero_()
        matrix.pack()
        assert matrix.is_packed
        fp8 = GroupFormat("fp8_e4m3", 0, "float32", quantized_activations=True)
        has_panels = Blocks(fp8).create(64, 128, torch.bfloat16, kernels, count=2)._panels is not None
        assert has_panels == (kernels is TRITON_FP8)  # elsewhere e4m3 is decoded on its way
