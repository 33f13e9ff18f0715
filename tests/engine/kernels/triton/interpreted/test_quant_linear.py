"""GEMMs with matrices in blocks by Triton, in every format, compared with dequantized matrices: sizes around tiles,
units and groups, slices of wider tensors, and NaN.
"""

from __future__ import annotations

import random

import pytest
import torch

from stoker_engine.architectures.stored_formats import GGUF_FORMATS, GGUFFormat, GroupFormat, StoredFormat
from stoker_engine.kernels.blocks import dequantize
from stoker_engine.kernels.reference import REFERENCE
from stoker_engine.kernels.triton.bundle import TRITON

from .....support.engine.gguf_random import SCALES, random_blocks
from ...group_random import CODES, name_of, random_groups, some_formats
from ...group_random import SCALES as GROUP_SCALES

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NEAR = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 2e-3}
OUTPUTS = (1, 15, 63, 64, 65)
TOKENS = (1, 2, 15, 16, 17, 33, 63, 65)
#: Around units, pieces, tiles and groups.
WIDTHS = (1, 16, 31, 32, 33, 63, 64, 65, 97, 127, 128, 129, 160, 255, 256, 257, 300)
GROUP_FORMATS = [
    pytest.param(format, marks=[pytest.mark.slow] * (index % 6 > 0), id=name_of(format))
    for index, format in enumerate(some_formats(6, seed=21))
]


#: The most common types in files.
GGUF = [
    pytest.param(format, marks=[pytest.mark.slow] * (name not in ("Q8_0", "Q4_K", "Q6_K")), id=name)
    for name, format in GGUF_FORMATS.items()
]


def check(blocks: torch.Tensor, stored: StoredFormat, inner: int, dtype: torch.dtype, tokens: int, seed: int) -> None:
    """Compare with dequantized values in float64; other rows of the batch change no bit of a row."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, inner + seed % 3, generator=generator).to(dtype)[:, :inner]
    bias = torch.randn(len(blocks), generator=generator).to(dtype) if seed % 2 else None
    multiply = TRITON.quant_linear(blocks, stored, inner, dtype, bias)
    got = multiply(x)
    weight = dequantize(blocks, stored, inner, dtype).double()
    added = torch.zeros(1) if bias is None else bias.double()
    exact = x.double() @ weight.T + added
    size = x.double().abs() @ weight.abs().T + added.abs() + 1e-3
    assert got.dtype == dtype and got.shape == exact.shape and got.is_contiguous()
    assert float(((got.double() - exact).abs() / size).max()) < NEAR[dtype], (inner, len(blocks), tokens)
    padded = torch.full_like(x, float("nan"))
    padded[-1] = x[-1]
    assert torch.equal(multiply(padded)[-1], got[-1])


@pytest.mark.parametrize("format", GROUP_FORMATS)
def test_quant_linear_equals_float64_in_group_formats(format: GroupFormat) -> None:
    draw = random.Random(name_of(format))
    for index, dtype in enumerate(DTYPES):
        inner, outputs, tokens = draw.choice(WIDTHS), draw.choice(OUTPUTS), draw.choice(TOKENS)
        drawn = random_groups(format, outputs + 2, inner, seed=index)
        part = torch.cat([torch.zeros(outputs + 2, 5).byte(), drawn.blocks], dim=-1)[
            1:-1, 5:
        ]  # rows are not contiguous, at odd offsets
        check(part, format, inner, dtype, tokens, index + inner)


@pytest.mark.parametrize("format", GGUF)
def test_quant_linear_equals_float64_in_gguf_types(format: GGUFFormat) -> None:
    draw = random.Random(format.name)
    for index, dtype in enumerate(DTYPES):
        inner = draw.choice((1, 2, 3, 5) if format.numbers < 256 else (1, 2)) * format.numbers
        outputs, tokens = draw.choice(OUTPUTS), draw.choice(TOKENS)
        blocks = random_blocks(format, outputs + 2, inner // format.numbers, seed=index)
        part = torch.cat([torch.zeros(outputs + 2, 5).byte(), blocks], dim=-1)[1:-1, 5:]
        check(part, format, inner, dtype, tokens, index + inner)


def scaled(stored: StoredFormat) -> torch.Tensor:
    """Return [512, bytes of a row]: random bytes, all byte scales, and float16 scales with all exponents."""
    blocks = torch.randint(0, 256, (512, stored.row_bytes(256)), generator=torch.Generator().manual_seed(5)).byte()
    offsets = SCALES.get(stored.name, ()) if isinstance(stored, GGUFFormat) else range(0, 8, 2)
    halves = torch.arange(0, 1 << 16, 1 << 7, dtype=torch.int32).to(torch.uint16).view(torch.uint8).view(-1, 2)
    for offset in offsets:
        blocks[:, offset : offset + 2] = halves
    if stored.name == "MXFP4":
        blocks[:, 0] = torch.arange(512)
    return blocks


@pytest.mark.parametrize(
    "stored",
    [
        *(GroupFormat("fp4", 0, scale) for scale in GROUP_SCALES),
        *(pytest.param(GroupFormat(code, 0, "float32"), marks=pytest.mark.slow) for code in CODES),
        *(pytest.param(each, marks=pytest.mark.slow) for each in GGUF_FORMATS.values() if each.numbers > 1),
    ],
    ids=lambda stored: f"{stored.name} {getattr(stored, 'scale', '')}",
)
def test_quant_linear_equals_the_reference_for_any_bytes(stored: StoredFormat) -> None:
    """This includes subnormal, infinite and NaN scales; a product selects one column."""
    blocks = scaled(stored)
    for column in (0, 200):
        x = torch.zeros(1, 256)
        x[0, column] = 1.0
        got = TRITON.quant_linear(blocks, stored, 256, torch.float32)(x)
        expected = REFERENCE.quant_linear(blocks, stored, 256, torch.float32)(x)
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=0, equal_nan=True)


def test_quant_linear_accepts_empty_and_strided_inputs() -> None:
    format = GroupFormat("uint4", 32, "float16")
    blocks = random_groups(format, 3, 48, seed=1).blocks
    for rows, x in ((3, torch.ones(0, 48)), (0, torch.ones(2, 48)), (3, torch.ones(2, 0, 48))):
        got = TRITON.quant_linear(blocks[:rows], format, 48, torch.float32)(x)
        assert got.shape == (*x.shape[:-1], rows)
    many = torch.randn(2, 3, 48, generator=torch.Generator().manual_seed(1))
    got = TRITON.quant_linear(blocks, format, 48, torch.float32)(many.transpose(0, 1))
    assert torch.equal(got, TRITON.quant_linear(blocks, format, 48, torch.float32)(many).transpose(0, 1))
