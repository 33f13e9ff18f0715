"""Experts in blocks by Triton, compared with torch in float64 on dequantized values."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from stoker_engine.architectures.stored_formats import GGUF_FORMATS, GGUFFormat, GroupFormat, StoredFormat
from stoker_engine.kernels.blocks import dequantize
from stoker_engine.kernels.bundle import BlockStack
from stoker_engine.kernels.triton.bundle import TRITON

from .....support.engine.gguf_random import random_blocks
from ...group_random import name_of, random_groups, some_formats
from .test_experts import draw_chosen, unwritten_is_nan

__all__ = ["unwritten_is_nan"]

NEAR = {torch.float32: 1e-5, torch.bfloat16: 2.5e-2, torch.float16: 4e-3}
#: Formats of gpt-oss, DeepSeek-V3, GPTQ and AWQ, and llama.cpp's files.
MODELS: list[tuple[StoredFormat, StoredFormat]] = [
    (GroupFormat("fp4", 32, "e8m0"),) * 2,
    (GroupFormat("fp8_e4m3", 128, "float32"),) * 2,
    (GroupFormat("uint4", 128, "float16", zero=True),) * 2,
    (GGUF_FORMATS["Q4_K"], GGUF_FORMATS["Q6_K"]),
    (GGUF_FORMATS["Q8_0"], GGUF_FORMATS["F16"]),
]


def draw_stack(
    stored: StoredFormat, experts: int, outputs: int, inner: int, dtype: torch.dtype, seed: int
) -> BlockStack:
    """Draw experts that are not contiguous, with biases."""
    width = stored.row_bytes(inner)
    larger = torch.full((experts, outputs + 3, width + 5), 0xFF, dtype=torch.uint8)
    for expert in range(experts):
        if isinstance(stored, GGUFFormat):
            blocks = random_blocks(stored, outputs, inner // stored.numbers, seed + expert)
        else:
            blocks = random_groups(stored, outputs, inner, seed + expert).blocks
        larger[expert, 1:-2, 2:-3] = blocks
    biases = torch.randn(experts, outputs, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return BlockStack(larger[:, 1:-2, 2:-3], stored, inner, biases)


def check(
    formats: tuple[StoredFormat, StoredFormat], hidden: int, size: int, tokens: int, dtype: torch.dtype, seed: int
) -> None:
    """Check each kind of GEMM separately, and all together: within rounding, which grows with the values."""
    gate_up = draw_stack(formats[0], 3, 2 * size, hidden, dtype, seed)
    down = draw_stack(formats[1], 3, hidden, size, dtype, seed + 10)
    generator = torch.Generator().manual_seed(seed)
    # Values of random blocks may be large; the gates' results must fit in float16.
    first, second = (dequantize(each.blocks, each.stored, each.inner, dtype).double() for each in (gate_up, down))
    x = torch.randn(tokens, hidden, generator=generator)
    x = (x / first.abs().max().float().clamp_min(1.0)).to(dtype)
    weights, chosen = torch.rand(tokens, 2, generator=generator), draw_chosen(tokens, 2, 4, seed)
    got = TRITON.block_experts(gate_up, down, "silu", dtype)(x, weights, chosen)
    assert got.dtype == dtype and got.shape == x.shape
    assert gate_up.biases is not None and down.biases is not None
    expected = torch.zeros(tokens, hidden, dtype=torch.float64)
    size_of_sums = torch.zeros(tokens, hidden, dtype=torch.float64)
    for token, row in enumerate(chosen.tolist()):
        for index, expert in enumerate(row):
            if expert == 3:
                continue
            gate, up = (first[expert] @ x[token].double() + gate_up.biases[expert].double()).chunk(2)
            inner = functional.silu(gate) * up
            weight = weights[token, index].double()
            expected[token] += weight * (second[expert] @ inner + down.biases[expert].double())
            size_of_sums[token] += weight * (second[expert].abs() @ inner.abs() + 1)
    error = ((got.double() - expected).abs() / size_of_sums.clamp_min(1e-30)).max() if tokens else 0.0
    assert error <= NEAR[dtype], (formats, error)


@pytest.mark.parametrize(
    "formats", [pytest.param(each, marks=[pytest.mark.slow] * (number > 0)) for number, each in enumerate(MODELS)],
    ids=lambda each: f"{each[0].name}, {each[1].name}",
)  # fmt: skip
def test_block_experts_equal_float64_in_formats_of_models(formats: tuple[StoredFormat, StoredFormat]) -> None:
    check(formats, 256, 256, 9, torch.bfloat16, 1)


@pytest.mark.parametrize("tokens", [0, 1, pytest.param(40, marks=pytest.mark.slow)])
def test_block_experts_accept_any_number_of_tokens(tokens: int) -> None:
    check(MODELS[0], 64, 32, tokens, torch.float32, 2)


@pytest.mark.slow
@pytest.mark.parametrize("stored", some_formats(2, seed=8), ids=name_of)
def test_block_experts_equal_float64_in_random_formats(stored: GroupFormat) -> None:
    """Rows end within a tile, a unit, or a group."""
    check((stored, stored), 144, 80, 18, torch.float32, 3)
