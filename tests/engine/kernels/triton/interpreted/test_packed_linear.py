"""Matrices packed into tiles of words: their layout, and GEMMs with them, compared with dequantized matrices: numbers
of tokens and sizes around tiles, groups, parts and slabs, slices of wider tensors, and hostile scales.
"""

from __future__ import annotations

import random

import pytest
import torch

from stoker_engine.architectures.stored_formats import GGUF_FORMATS, GGUFFormat, GroupFormat, StoredFormat
from stoker_engine.kernels.blocks import dequantize
from stoker_engine.kernels.bundle import Kernels
from stoker_engine.kernels.group_blocks import decode, encode
from stoker_engine.kernels.triton.batch_invariant import BATCH_INVARIANT
from stoker_engine.kernels.triton.bundle import TRITON
from stoker_engine.kernels.triton.gemm import packed_linear, packed_quant_gemm
from stoker_engine.kernels.triton.gemm.sum_parts import sum_parts
from stoker_engine.kernels.triton.quant import pack
from stoker_engine.kernels.triton.quant.dequantize_packed import dequantize_packed
from stoker_engine.kernels.triton.quant.packed_layout import packed_matrix, tile_of
from stoker_engine.kernels.triton.quant.packed_rows import packed_rows
from stoker_engine.quant.blocks import BlockMatrix, Blocks
from stoker_engine.quant.segments import merged
from stoker_engine.quant.weight_target import Shard
from stoker_engine.sizing import packed_weights
from stoker_engine.sizing.packed_weights import PACKED_TYPES

from .....support.engine.gguf_random import dequantized, random_blocks
from ...group_random import name_of, random_groups

NEAR = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 2e-3}
#: Around the widths of tiles, and the number from which matrices are dequantized first.
TOKENS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200)
GROUPS: list[GroupFormat] = [
    GroupFormat("uint4", 32, "float16", zero=True),
    GroupFormat("uint4", 128, "float16"),
    GroupFormat("uint4", 64, "bfloat16", zero=True),
    GroupFormat("uint4", 0, "float32", zero=True),
    GroupFormat("uint4", 16, "float16"),
    GroupFormat("uint4", 48, "bfloat16", zero=True),
    GroupFormat("uint4", 256, "float16", zero=True),
    GroupFormat("int8", 32, "float16"),
    GroupFormat("int8", 0, "float32"),
    GroupFormat("int8", 64, "bfloat16"),
    GroupFormat("uint8", 128, "float16", zero=True),
    GroupFormat("uint8", 48, "float16", zero=True),
    GroupFormat("uint8", 16, "bfloat16"),
    GroupFormat("fp4", 32, "e8m0"),
    GroupFormat("fp4", 16, "fp8_e4m3", row_scale=True),
    GroupFormat("fp4", 0, "e8m0"),
    GroupFormat("fp4", 48, "fp8_e4m3"),
]
FORMATS: list[StoredFormat] = [*GROUPS, *(GGUF_FORMATS[name] for name in PACKED_TYPES)]


def label(stored: StoredFormat) -> str:
    return stored.name if isinstance(stored, GGUFFormat) else name_of(stored)


SOME_FORMATS = [
    pytest.param(stored, marks=[pytest.mark.slow] * (index % 4 > 0), id=label(stored))
    for index, stored in enumerate(FORMATS)
]


def some_inner(stored: StoredFormat, tiles: int) -> int:
    """Return a number of columns that fill `tiles` of the smallest tiles, or one or two of GGUF's blocks of 256."""
    if isinstance(stored, GGUFFormat) and stored.numbers == 256:
        return 256 * (1 + tiles % 2)
    return tiles * tile_of(stored, 1).columns


def random_matrix(stored: StoredFormat, outputs: int, inner: int, seed: int) -> torch.Tensor:
    """Return finite blocks at a place of a larger tensor."""
    if isinstance(stored, GGUFFormat):
        drawn = random_blocks(stored, outputs, inner // stored.numbers, seed=seed)
    else:
        drawn = random_groups(stored, outputs, inner, seed=seed).blocks
    return torch.cat((torch.zeros(16, drawn.shape[1]).byte(), drawn))[16:]


def packed(blocks: torch.Tensor, stored: StoredFormat, inner: int) -> torch.Tensor:
    """Return a packed copy of a matrix."""
    copied = blocks.clone()
    pack.pack(copied, stored, inner)
    return copied


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether tensors are equal, also in the places of NaN."""
    return torch.equal(found.isnan(), expected.isnan()) and torch.equal(found.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("words", [16, 8])
@pytest.mark.parametrize("stored", GROUPS, ids=label)
def test_each_code_is_in_its_place(stored: GroupFormat, words: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "_ELEMENTS", 1 << 16)  # packed in several steps
    planes = 32 // stored.bits
    outputs, inner = 320, words * planes * 3
    blocks = random_matrix(stored, outputs, inner, seed=3)
    codes = decode(blocks, stored, inner).codes.int() ^ (128 if stored.code == "int8" else 0)
    matrix = packed_matrix(packed(blocks, stored, inner), stored, inner)
    assert matrix.tile.words == words
    row, column = torch.meshgrid(torch.arange(outputs), torch.arange(inner), indexing="ij")
    tile, in_row, in_column = column // (words * planes), row % 64, column % (words * planes)
    plane, word = in_column // words, in_column % words
    # The bits of the index as the module's documentation lists them.
    bits = [(word, 3), *((in_row, bit) for bit in (5, 4, 2, 1, 0)), (word, 2), (word, 1), (in_row, 3), (word, 0)]
    index = sum((number >> bit & 1) << 9 - position for position, (number, bit) in enumerate(bits))
    found = matrix.memory[(row // 64 * 3 + tile) * 64 * words + index]
    assert torch.equal(found >> plane * stored.bits & (1 << stored.bits) - 1, codes)


@pytest.mark.parametrize("stored", FORMATS, ids=label)
def test_rows_and_slabs_have_the_bits_of_dequantized_blocks(
    stored: StoredFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack, "_ELEMENTS", 1 << 14)  # packed in several steps
    outputs = 192
    for dtype, tiles in ((torch.bfloat16, 2), (torch.float16, 3), (torch.float32, 1)):
        inner = some_inner(stored, tiles)
        blocks = random_matrix(stored, outputs, inner, seed=4)
        there = packed(blocks, stored, inner)
        if isinstance(stored, GGUFFormat):
            weight = dequantized(blocks, stored, dtype)
        else:
            weight = dequantize(blocks, stored, inner, dtype)
        for ids in ([], [5], [191, 0, 64, 63, 64, *range(100, 112)]):
            assert torch.equal(packed_rows(there, stored, inner, torch.tensor(ids).long(), dtype), weight[ids])
        out = torch.full((128, inner), float("nan"), dtype=dtype)
        dequantize_packed(packed_matrix(there, stored, inner), 64, out)
        assert torch.equal(out, weight[64:])


@pytest.mark.parametrize("name", PACKED_TYPES)
def test_any_bytes_of_a_block_have_the_reference_bits(name: str) -> None:
    """Scales that are zero, subnormal, infinite and NaN, and all codes."""
    stored = GGUF_FORMATS[name]
    outputs, inner = 64, 512
    generator = torch.Generator().manual_seed(5)
    blocks = torch.randint(0, 256, (outputs, stored.row_bytes(inner)), generator=generator, dtype=torch.uint8)
    there = packed(blocks, stored, inner)
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.zeros(outputs, inner, dtype=dtype)
        dequantize_packed(packed_matrix(there, stored, inner), 0, out)
        assert same(out, dequantize(blocks, stored, inner, dtype))


@pytest.mark.parametrize("scale", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(("code", "zero"), [("uint4", True), ("uint8", True), ("int8", False)])
def test_any_scale_and_zero_point_has_the_reference_bits(code: str, zero: bool, scale: str) -> None:
    """Every exponent of a scale: zero, subnormal, infinite and NaN, and zero points of all bytes."""
    format = GroupFormat(code, 16, scale, zero=zero)  # type: ignore[arg-type]
    outputs, inner = 512, 128
    generator = torch.Generator().manual_seed(6)
    patterns = torch.randint(0, 1 << 16, (outputs, inner // 16), generator=generator)
    patterns[:, 0] = torch.arange(outputs) << 7  # all exponents, and both signs
    halves = patterns.to(torch.uint16)
    if scale == "float32":
        scales = (patterns << 16).to(torch.int32).view(torch.float32)
    else:
        scales = halves.view(torch.float16 if scale == "float16" else torch.bfloat16)
    check_scales(format, scales, zero=zero)


@pytest.mark.parametrize("scale", ["e8m0", "fp8_e4m3"])
def test_any_scale_of_one_byte_has_the_reference_bits(scale: str) -> None:
    format = GroupFormat("fp4", 16, scale, row_scale=scale == "fp8_e4m3")  # type: ignore[arg-type]
    scales = torch.arange(512 * 8).view(512, 8).byte()
    check_scales(format, scales, zero=False)


def check_scales(format: GroupFormat, scales: torch.Tensor, zero: bool) -> None:
    """Check a matrix with these scales, of groups of 16."""
    generator = torch.Generator().manual_seed(7)
    outputs, inner = len(scales), scales.shape[1] * 16
    codes = torch.randint(0, 1 << format.bits, (outputs, inner), generator=generator).byte()
    zeros = torch.randint(0, 256, scales.shape, generator=generator).byte() if zero else None
    of_rows = torch.rand(outputs, generator=generator) * 3 if format.row_scale else None
    blocks = encode(codes, scales, zeros, format, of_rows)
    there = packed(blocks, format, inner)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        expected = dequantize(blocks, format, inner, dtype)
        out = torch.zeros_like(expected)
        dequantize_packed(packed_matrix(there, format, inner), 0, out)
        assert same(out, expected)
    assert same(packed_rows(there, format, inner, torch.arange(outputs), dtype), expected)
    x = torch.zeros(1, inner)
    x[0, 3] = 1.0
    expected = torch.nn.functional.linear(x, dequantize(blocks, format, inner, torch.float32))
    got = TRITON.block_panels.linear(there, format, inner, torch.float32)(x)  # type: ignore[union-attr]
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("kernels", [TRITON, BATCH_INVARIANT], ids=["fastest", "batch invariant"])
@pytest.mark.parametrize("stored", SOME_FORMATS)
def test_packed_linear_equals_float64(stored: StoredFormat, kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(label(stored) + str(kernels is TRITON))
    operations = kernels.block_panels
    assert operations is not None
    for index, dtype in enumerate((torch.bfloat16, torch.float16, torch.float32)):
        monkeypatch.setattr(packed_quant_gemm, "_LEAST_TILES", draw.choice((1, 2, 4)))
        # Slabs of one tile, of some, and of the whole matrix.
        monkeypatch.setattr(packed_weights, "SLAB_BYTES", draw.choice((1, 100_000, 1 << 25)))
        inner = some_inner(stored, draw.choice((1, 2, 3, 5, 8)))
        outputs, tokens = 64 * draw.choice((1, 2, 3)), draw.choice(TOKENS)
        blocks = random_matrix(stored, outputs, inner, seed=index)
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(tokens, inner + index, generator=generator).to(dtype)
        x[:, inner:] = float("nan")  # must not be read
        x = x[:, :inner]
        bias = torch.randn(outputs, generator=generator).to(dtype) if draw.random() < 0.5 else None
        weight = dequantize(blocks, stored, inner, dtype).double()
        multiply = operations.linear(blocks, stored, inner, dtype, bias)
        operations.pack(blocks, stored, inner)
        got = multiply(x)
        added = torch.zeros(1) if bias is None else bias.double()
        exact = x.double() @ weight.T + added
        size = x.double().abs() @ weight.abs().T + added.abs() + 1e-3
        assert got.dtype == dtype and got.shape == exact.shape and got.is_contiguous()
        assert float(((got.double() - exact).abs() / size).max()) < NEAR[dtype], (inner, outputs, tokens)
        padded = torch.full_like(x, float("nan"))
        padded[-1] = x[-1]
        if tokens <= packed_linear.FEW_ROWS or kernels is BATCH_INVARIANT:
            assert torch.equal(multiply(padded)[-1], got[-1])


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_a_row_has_the_same_bits_in_every_batch(
    parts: int, batch_invariant_matmul: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `--batch-invariant`: a row alone, among few rows, and among so many that parts are not distributed."""
    monkeypatch.setattr(packed_quant_gemm, "_LEAST_TILES", 4 // parts)
    format, inner = GroupFormat("uint4", 32, "float16", zero=True), 512
    blocks = packed(random_matrix(format, 64, inner, seed=8), format, inner)
    multiply = BATCH_INVARIANT.block_panels.linear(blocks, format, inner, torch.bfloat16)  # type: ignore[union-attr]
    x = torch.randn(140, inner, generator=torch.Generator().manual_seed(8)).bfloat16()
    many = multiply(x)
    for first, last in ((0, 1), (20, 53), (139, 140), (4, 132)):
        assert torch.equal(multiply(x[first:last]), many[first:last])


def test_parts_are_added_in_order() -> None:
    generator = torch.Generator().manual_seed(9)
    for count, rows, outputs in ((1, 1, 64), (2, 3, 192), (9, 17, 64)):
        parts = torch.randn(count, rows, outputs, generator=generator) * 10.0 ** torch.arange(count).view(-1, 1, 1)
        bias = torch.randn(outputs, generator=generator)
        for added in (None, bias):
            expected = torch.zeros(rows, outputs)
            for each in parts:
                expected = expected + each
            expected = expected if added is None else expected + added
            assert torch.equal(sum_parts(parts, added, torch.float32), expected)


def test_linear_accepts_empty_and_strided_inputs() -> None:
    format, inner = GroupFormat("uint4", 32, "float16", zero=True), 128
    blocks = packed(random_matrix(format, 64, inner, seed=1), format, inner)
    multiply = TRITON.block_panels.linear(blocks, format, inner, torch.float32)  # type: ignore[union-attr]
    for x in (torch.ones(0, inner), torch.ones(2, 0, inner)):
        assert multiply(x).shape == (*x.shape[:-1], 64)
    many = torch.randn(2, 3, inner, generator=torch.Generator().manual_seed(1))
    assert torch.equal(multiply(many.transpose(0, 1)), multiply(many).transpose(0, 1))
    transposed = torch.randn(inner, 3, generator=torch.Generator().manual_seed(2)).t()
    assert torch.equal(multiply(transposed), multiply(transposed.contiguous()))


@pytest.mark.parametrize(
    ("stored", "outputs", "inner"),
    [
        (GroupFormat("uint4", 32, "float16"), 63, 128),
        (GroupFormat("uint4", 32, "float16"), 65, 128),
        (GroupFormat("uint4", 32, "float16"), 0, 128),
        (GroupFormat("uint4", 32, "float16"), 64, 32),
        (GroupFormat("uint4", 32, "float16"), 64, 160),
        (GroupFormat("int8", 16, "float16"), 64, 48),
        (GroupFormat("uint4", 32, "e8m0"), 64, 128),
        (GroupFormat("uint4", 32, "float16", row_scale=True), 64, 128),
        (GroupFormat("uint3", 32, "float16"), 64, 128),
        (GroupFormat("fp4", 32, "float16"), 64, 128),
        (GroupFormat("fp8_e4m3", 32, "bfloat16"), 64, 128),
        (GGUF_FORMATS["Q5_0"], 64, 96),
        (GGUF_FORMATS["Q3_K"], 64, 256),
        (GGUF_FORMATS["IQ4_NL"], 64, 128),
    ],
    ids=str,
)
def test_other_matrices_stay_rows(stored: StoredFormat, outputs: int, inner: int) -> None:
    matrix = Blocks(stored).create(outputs, inner, torch.float32, TRITON)
    drawn = random_matrix(stored, max(outputs, 1), inner, seed=2)[:outputs]
    matrix.blocks.data.copy_(drawn)
    matrix.pack()
    assert not matrix.is_packed and torch.equal(matrix.blocks.data, drawn)
    x = torch.randn(3, inner, generator=torch.Generator().manual_seed(2))
    expected = x.double() @ dequantize(drawn, stored, inner, torch.float32).double().T
    torch.testing.assert_close(matrix.linear()(x).double(), expected, rtol=1e-4, atol=1e-4)


def test_matrices_of_a_model_are_packed_after_loading() -> None:
    """Merged matrices, partly of another format; a column order; stacks."""
    four, eight = GroupFormat("uint4", 32, "float16", zero=True), GroupFormat("int8", 32, "float16")
    inner, x = 256, torch.randn(5, 256, generator=torch.Generator().manual_seed(3))
    drawn = [random_matrix(stored, 64, inner, seed) for seed, stored in enumerate((four, four, eight))]
    together = merged([(Blocks(four), 64), (Blocks(four), 64), (Blocks(eight), 64)], inner, torch.float32, TRITON)
    for index, blocks in enumerate(drawn):
        target = together.weight_target(64 * index, Shard.whole(64), Shard.whole(inner))
        target.tensor.copy_(blocks)
    multiply = together.linear()
    expected = multiply(x)
    matrices = [each for each in together.modules() if isinstance(each, BlockMatrix)]  # type: ignore[attr-defined]
    for each in matrices:
        each.pack()
        each.pack()  # has no effect
    assert [each.is_packed for each in matrices] == [True, True]
    assert not any(each.rounds_activations for each in matrices)
    torch.testing.assert_close(multiply(x), expected, rtol=1e-4, atol=1e-4)
    ids = torch.tensor([0, 127, 64])
    assert torch.equal(matrices[0].lookup(ids), dequantize(torch.cat(drawn[:2]), four, inner, torch.float32)[ids])

    ordered = GroupFormat("uint4", 32, "float16", zero=True, in_order_of="groups")
    matrix = Blocks(ordered).create(64, inner, torch.float32, TRITON)
    matrix.blocks.data.copy_(drawn[0])
    assert matrix.columns is not None
    matrix.columns.data.copy_(torch.randperm(inner, generator=torch.Generator().manual_seed(4)).int())
    before, looked_up = matrix.linear()(x), matrix.lookup(ids % 64)
    matrix.pack()
    assert matrix.is_packed
    torch.testing.assert_close(matrix.linear()(x), before, rtol=1e-4, atol=1e-4)
    assert torch.equal(matrix.lookup(ids % 64), looked_up)

    stack = Blocks(four).create(64, inner, torch.float32, TRITON, count=2)
    stack.blocks.data.copy_(torch.stack(drawn[:2]))
    one_by_one = stack.linears()
    before = [linear(x) for linear in one_by_one]
    stack.pack()
    assert stack.is_packed
    torch.testing.assert_close([linear(x) for linear in one_by_one], before, rtol=1e-4, atol=1e-4)
