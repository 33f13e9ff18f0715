"""Matrices in panels: packed where they are, looked up, and multiplied."""

from __future__ import annotations

import ctypes

import pytest
import torch

from stoker_engine.kernels.bundle import Panels
from stoker_engine.kernels.native.levels import usable_levels
from stoker_engine.kernels.native.library import load
from stoker_engine.kernels.native.panels import panels
from stoker_engine.kernels.panels import packed


@pytest.fixture(
    params=[
        pytest.param(level, id=level.name, marks=[pytest.mark.slow] * (n > 0))
        for n, level in enumerate(usable_levels())
    ]
)
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    """The kernels of one level."""
    return load(request.param)


@pytest.fixture
def operations(library: ctypes.CDLL) -> Panels:
    """Those of a level that has panels."""
    found = panels(library)
    if found is None:
        pytest.skip("this level multiplies rows")
    return found


def random(*shape: int) -> torch.Tensor:
    """Normal numbers; the seed is the shape."""
    generator = torch.Generator().manual_seed(sum(n * 31**i for i, n in enumerate(shape)))
    return torch.randn(*shape, generator=generator).bfloat16()


#: Whole groups of panels, single panels, rows beyond the last; one, two and a half depths of a block.
SHAPES = [(16, 2), (17, 34), (64, 62), (100, 64), (129, 640), (48, 2048), (80, 2050), (33, 5000)]


@pytest.mark.parametrize("outputs,inner", SHAPES)
def test_a_matrix_is_packed_where_it_is(operations: Panels, outputs: int, inner: int) -> None:
    weight = random(outputs, inner)
    in_panels = weight.clone()
    operations.pack(in_panels)
    assert torch.equal(in_panels, packed(weight))
    ids = torch.randperm(outputs, generator=torch.Generator().manual_seed(outputs))[:9]
    assert torch.equal(operations.rows(in_panels, ids), weight[ids])


@pytest.mark.parametrize("outputs,inner", SHAPES)
def test_rows_have_the_same_bits_in_every_batch(operations: Panels, outputs: int, inner: int) -> None:
    """Of every number of rows that a tile has, and around a block's; bias or none."""
    weight, bias = random(outputs, inner), random(outputs)
    wide = random(200, inner + 6)
    x = wide[:, 3 : inner + 3]
    in_panels = weight.clone()
    operations.pack(in_panels)
    for added in (None, bias):
        product = operations.product(in_panels, added)
        got = product(x)
        exact = x.double() @ weight.double().T + (0 if added is None else added.double())
        # Sums are float32 and rounded once.
        assert ((got.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-5 * inner).all()
        for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 95, 96, 97, 103):
            assert torch.equal(product(x[:rows]), got[:rows]), rows
            assert torch.equal(product(x[-rows:]), got[-rows:]), rows


def test_what_is_no_number_stays_in_its_row(operations: Panels) -> None:
    weight, x = random(40, 64), random(10, 64)
    operations.pack(weight)
    product = operations.product(weight)
    expected = product(x)
    x[3, 5], x[7, 63] = torch.nan, torch.inf
    got = product(x)
    assert got[3].isnan().all() and not got[7].isfinite().any()
    others = [row for row in range(10) if row not in (3, 7)]
    assert torch.equal(got[others], expected[others])


@pytest.mark.parametrize("shape", [(15, 64), (64, 33)])
def test_a_matrix_without_a_panel_is_not_packed(operations: Panels, shape: tuple[int, int]) -> None:
    assert not operations.fit(random(*shape))
    assert not operations.fit(random(64, 64).float()) and not operations.fit(random(64, 128)[:, :64])


def test_there_is_no_other_row(operations: Panels) -> None:
    weight = random(32, 64)
    operations.pack(weight)
    for row in (-1, 32):
        with pytest.raises(IndexError, match="of 32"):
            operations.rows(weight, torch.tensor([0, row]))
