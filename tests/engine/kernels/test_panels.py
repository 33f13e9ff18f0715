"""Matrices in panels: packing in place, lookup, and GEMM."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from stoker_engine.architectures.stored_formats import GGUF_FORMATS, GGUFFormat, GroupFormat, StoredFormat
from stoker_engine.kernels.bundle import BlockPanels, Panels
from stoker_engine.kernels.cpu.block_panels import block_panels
from stoker_engine.kernels.cpu.blocks import rows as plain_rows
from stoker_engine.kernels.cpu.library import load
from stoker_engine.kernels.cpu.panels import panels
from stoker_engine.kernels.int8_activations import block_of, int8_activations
from stoker_engine.kernels.panels import PANEL, packed

from ...support.engine.gguf_random import SCALES, same
from .each_isa import each_isa
from .group_random import CODES
from .stored_random import GGUF_IN_PANELS, IN_PANELS, id_of, random_stored, whole_numbers


@pytest.fixture(params=each_isa())
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    """Kernels of one ISA."""
    return load(request.param)


@pytest.fixture
def operations(library: ctypes.CDLL) -> Panels:
    """Operations of an ISA that has panels."""
    found = panels(library)
    if found is None:
        pytest.skip("this ISA has no panels")
    return found


@pytest.fixture
def of_blocks(library: ctypes.CDLL) -> BlockPanels:
    """Block operations of an ISA that has panels."""
    found = block_panels(library)
    if found is None:
        pytest.skip("this ISA has no panels")
    return found


def random(*shape: int) -> torch.Tensor:
    """Return normal random values; the seed is the shape."""
    generator = torch.Generator().manual_seed(sum(n * 31**i for i, n in enumerate(shape)))
    return torch.randn(*shape, generator=generator).bfloat16()


#: Whole groups of panels, single panels, rows beyond the last one; one, two and a half depths of a block; runs of more
#: panels than a group, as many as threads need or as a run may be long.
SHAPES = [(16, 2), (17, 34), (64, 62), (100, 64), (129, 640), (48, 2048), (80, 2050), (33, 5000)]
SHAPES += [(1100, 66), (1300, 5000)]


@pytest.mark.parametrize("outputs,inner", SHAPES)
def test_matrix_is_packed_in_place(operations: Panels, outputs: int, inner: int) -> None:
    weight = random(outputs, inner)
    in_panels = weight.clone()
    operations.pack(in_panels)
    assert torch.equal(in_panels, packed(weight))
    ids = torch.randperm(outputs, generator=torch.Generator().manual_seed(outputs))[:9]
    assert torch.equal(operations.rows(in_panels, ids), weight[ids])


@pytest.mark.parametrize("outputs,inner", SHAPES)
def test_rows_have_the_same_bits_in_every_batch(operations: Panels, outputs: int, inner: int) -> None:
    """Batches of all sizes up to a tile's, and around a block's; with and without bias."""
    weight, bias = random(outputs, inner), random(outputs)
    wide = random(200, inner + 6)
    x = wide[:, 3 : inner + 3]
    in_panels = weight.clone()
    operations.pack(in_panels)
    for added in (None, bias):
        linear = operations.linear(in_panels, added)
        got = linear(x)
        exact = x.double() @ weight.double().T + (0 if added is None else added.double())
        # Sums are float32 and rounded once.
        assert ((got.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-5 * inner).all()
        for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 95, 96, 97, 103):
            assert torch.equal(linear(x[:rows]), got[:rows]), rows
            assert torch.equal(linear(x[-rows:]), got[-rows:]), rows


def test_nan_and_infinity_affect_only_their_row(operations: Panels) -> None:
    weight, x = random(40, 64), random(10, 64)
    operations.pack(weight)
    linear = operations.linear(weight)
    expected = linear(x)
    x[3, 5], x[7, 63] = torch.nan, torch.inf
    got = linear(x)
    assert got[3].isnan().all() and not got[7].isfinite().any()
    finite_rows = [row for row in range(10) if row not in (3, 7)]
    assert torch.equal(got[finite_rows], expected[finite_rows])


@pytest.mark.parametrize("shape", [(15, 64), (64, 33)])
def test_unsuitable_matrices_do_not_fit(operations: Panels, shape: tuple[int, int]) -> None:
    assert not operations.fit(random(*shape))
    assert not operations.fit(random(64, 64).float()) and not operations.fit(random(64, 128)[:, :64])


def test_lookup_refuses_rows_outside_of_the_matrix(operations: Panels) -> None:
    weight = random(32, 64)
    operations.pack(weight)
    for row in (-1, 32):
        with pytest.raises(IndexError, match="of 32"):
            operations.rows(weight, torch.tensor([0, row]))


def scale_offsets(stored: StoredFormat) -> Sequence[int]:
    """Return the offsets of a row's float16 scales."""
    if isinstance(stored, GGUFFormat):
        return SCALES[stored.name]
    return [0] if stored.scale == "float16" else []


def multiplied(
    x: torch.Tensor, block: int, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the expected result: x quantized to 8 bits in blocks, multiplied by the panels' values [outputs, inner],
    and x itself by the rest; and the tolerance: sums are float32, and results and the part outside of panels are
    rounded to bfloat16.
    """
    whole = len(weight) // PANEL * PANEL
    tail = x.double() @ weight[whole:].bfloat16().double().T
    exact = torch.cat((int8_activations(x, block) @ weight[:whole].T, tail), dim=1)
    summed = x.double().abs() @ weight.abs().T
    exact += 0 if bias is None else bias.double()
    return exact, exact.abs() * 2**-8 + summed * 2**-19


@pytest.mark.parametrize("outputs,units", [(16, 1), (33, 2), (64, 8), (100, 9), (150, 20), (48, 160), (1100, 1)])
@pytest.mark.parametrize("stored", IN_PANELS, ids=id_of)
def test_block_panels_multiply_in_8_bits(
    library: ctypes.CDLL, of_blocks: BlockPanels, stored: StoredFormat, outputs: int, units: int
) -> None:
    """The blocks hold any bytes; a row has the same bits in batches of all sizes."""
    inner = whole_numbers(stored, units * 32)
    blocks = random_stored(stored, outputs, inner, seed=outputs)
    hostile = blocks.clone()
    hostile[outputs // 3] = torch.arange(hostile.shape[1], dtype=torch.uint8) * 7 + 3
    for offset in scale_offsets(stored):
        hostile[outputs // 2, offset : offset + 2] = torch.tensor([0, [0x7C, 0x7E][units % 2]])  # inf, or nan
        hostile[outputs // 4, offset : offset + 2] = torch.tensor([1, 0])  # a subnormal
    bias, x = random(outputs), random(210, inner + 6)[:, 3 : inner + 3]
    x[7], x[8], x[9, 5:] = 0, 1e-31, 1e30  # zeros, values too small for a scale, large values
    for matrix, added in ((blocks, bias), (hostile, None)):
        plain = plain_rows(library, matrix, stored, inner, torch.arange(outputs), torch.float32)
        in_panels = matrix.clone()
        assert of_blocks.fit(in_panels, stored, inner, torch.bfloat16)
        of_blocks.pack(in_panels, stored, inner)
        ids = torch.randperm(outputs, generator=torch.Generator().manual_seed(outputs))[:9]
        assert same(of_blocks.rows(in_panels, stored, inner, ids, torch.bfloat16), plain[ids].bfloat16())
        linear = of_blocks.linear(in_panels, stored, inner, torch.bfloat16, added)
        got, (exact, tolerance) = linear(x), multiplied(x, block_of(stored, inner), plain.double(), added)
        is_bounded = tolerance < 1e38 * 2**-19  # partial sums are finite
        assert is_bounded[:7, : outputs // 4].all() and ((got - exact).abs() <= tolerance)[is_bounded].all()
        assert not got[:7][~exact[:7].isfinite()].isfinite().any()
        for count in (1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 14, 19, 32, 96, 191, 192, 193, 204, 205, 210):
            assert same(linear(x[:count]), got[:count]), count
            assert same(linear(x[-count:]), got[-count:]), count


@pytest.mark.parametrize("stored", IN_PANELS, ids=id_of)
def test_sums_of_largest_codes_are_exact(library: ctypes.CDLL, of_blocks: BlockPanels, stored: StoredFormat) -> None:
    """All codes of a row are the smallest or the largest, and all of x are ±127: sums of 16 bits may not overflow."""
    inner = whole_numbers(stored, 256)
    blocks = random_stored(stored, 64, inner, seed=3)
    scales = [offset + i for offset in scale_offsets(stored) for i in (0, 1)]
    for row, byte in enumerate([0x00, 0x7F, 0x80, 0xFF] * 16):
        if isinstance(stored, GGUFFormat):
            kept = blocks[row].view(-1, stored.bytes)[:, scales].clone()
            blocks[row] = byte
            blocks[row].view(-1, stored.bytes)[:, scales] = kept
        else:
            blocks[row, -(inner * stored.bits // 8) :] = byte
    signs = random(8, inner).sign()
    x = torch.cat((torch.ones(1, inner), -torch.ones(1, inner), signs.float())).bfloat16()
    x = torch.cat((x, x[:, torch.arange(inner) // 2 % 2 * 2], x.repeat(4, 1)))
    plain = plain_rows(library, blocks, stored, inner, torch.arange(64), torch.float32)
    of_blocks.pack(blocks, stored, inner)
    linear = of_blocks.linear(blocks, stored, inner, torch.bfloat16)
    exact, tolerance = multiplied(x, block_of(stored, inner), plain.double(), None)
    tolerance += tolerance.max() * 1e-4  # of codes that equal their zero point, larger sums cancel
    for rows in (1, 4, len(x)):
        assert ((linear(x[:rows]) - exact[:rows]).abs() <= tolerance[:rows]).all(), rows


@pytest.mark.parametrize("stored", IN_PANELS, ids=id_of)
def test_nan_and_infinity_affect_only_their_row_by_block_panels(of_blocks: BlockPanels, stored: StoredFormat) -> None:
    blocks, x = random_stored(stored, 40, 256, seed=1), random(10, 256)
    of_blocks.pack(blocks, stored, 256)
    linear = of_blocks.linear(blocks, stored, 256, torch.bfloat16)
    expected = linear(x)
    x[3, 5], x[7, 63], x[8, 255] = torch.nan, torch.inf, -torch.inf
    got = linear(x)
    assert got[3].isnan().all() and not got[[7, 8]].isfinite().any()
    finite_rows = [row for row in range(10) if row not in (3, 7, 8)]
    assert torch.equal(got[finite_rows], expected[finite_rows])


def test_unsuitable_blocks_do_not_fit(of_blocks: BlockPanels) -> None:
    q8, int8 = GGUF_FORMATS["Q8_0"], GroupFormat("int8", 0, "float32")
    for stored in (q8, int8):
        blocks = random_stored(stored, 64, 128, seed=1)
        assert of_blocks.fit(blocks, stored, 128, torch.bfloat16)
        assert not of_blocks.fit(blocks, stored, 128, torch.float32)
        assert not of_blocks.fit(blocks[:15], stored, 128, torch.bfloat16)
        assert not of_blocks.fit(blocks[:, :68], stored, 64, torch.bfloat16)
        of_blocks.pack(blocks, stored, 128)
        for row in (-1, 64):
            with pytest.raises(IndexError, match="of 64"):
                of_blocks.rows(blocks, stored, 128, torch.tensor([0, row]), torch.bfloat16)
    unsupported: list[StoredFormat] = [each for name, each in GGUF_FORMATS.items() if name not in GGUF_IN_PANELS]
    unsupported += [replace(int8, row_scale=True), replace(int8, group=48), replace(int8, scale="e8m0")]
    unsupported += [GroupFormat(code, 0, "float32") for code in CODES if code not in ("uint4", "uint8", "int8")]
    for stored in unsupported:
        assert not of_blocks.fit(random_stored(stored, 64, 512, seed=1), stored, 512, torch.bfloat16), stored
    assert not of_blocks.fit(random_stored(int8, 64, 100, seed=1), int8, 100, torch.bfloat16)
