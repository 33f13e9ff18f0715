"""Weights in Q8_0's blocks against what the gguf library makes of them, and against products with those numbers."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize as gguf_dequantize
from gguf.quants import quantize as gguf_quantize

from stoker_engine.architectures.stored_formats import Q8_0
from stoker_engine.kernels import q8_0
from stoker_engine.kernels.bundle import Kernels
from stoker_engine.kernels.native import q8_0 as native
from stoker_engine.kernels.native.bundle import native_kernels
from stoker_engine.kernels.native.levels import usable_levels
from stoker_engine.kernels.native.library import load
from stoker_engine.kernels.native.linear import product as dense_product
from stoker_engine.kernels.reference import REFERENCE

from .q8_0_blocks import random_blocks

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(
    params=[
        pytest.param(level, id=level.name, marks=[pytest.mark.slow] * (n > 0))
        for n, level in enumerate(usable_levels())
    ]
)
def kernels(request: pytest.FixtureRequest) -> ctypes.CDLL:
    """The kernels of one level; all but this processor's best take a compilation more."""
    return load(request.param)


@pytest.fixture(params=["reference", "native"])
def operations(request: pytest.FixtureRequest) -> Kernels:
    """Both sets of kernels."""
    return REFERENCE if request.param == "reference" else native_kernels(load(usable_levels()[0]))


def numbers(blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What the gguf library says they are, rounded by torch."""
    with np.errstate(invalid="ignore"):
        exact = gguf_dequantize(blocks.contiguous().numpy(), GGMLQuantizationType.Q8_0)
    return torch.from_numpy(exact).to(dtype)


def every_scale() -> torch.Tensor:
    """[65536, 34]: each float16 there is (subnormal, infinite and not-a-number ones too), with extreme integers."""
    scales = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.uint8).view(-1, 2)
    integers = torch.tensor([0, 1, -1, 127, -128, 77, -3, 64] * 4, dtype=torch.int8).view(torch.uint8)
    return torch.cat([scales, integers.expand(1 << 16, 32)], dim=1)


def same(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """To the bit, but for which not-a-number it is."""
    return torch.equal(got.isnan(), wanted.isnan()) and torch.equal(
        torch.where(got.isnan(), 0, got).view(torch.uint8), torch.where(wanted.isnan(), 0, wanted).view(torch.uint8)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_scale_is_read_as_gguf_does(dtype: torch.dtype) -> None:
    blocks = every_scale()
    assert same(q8_0.dequantize(blocks, dtype), numbers(blocks, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_level_reads_every_scale(kernels: ctypes.CDLL, dtype: torch.dtype) -> None:
    blocks = every_scale()
    assert same(native.dequantize(kernels, blocks, dtype), numbers(blocks, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_product_is_that_of_the_numbers(operations: Kernels, dtype: torch.dtype) -> None:
    """Of weights that the gguf library has quantized, close to the product with those it was given."""
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(48, 160, generator=generator)
    blocks = torch.from_numpy(gguf_quantize(weight.numpy(), GGMLQuantizationType.Q8_0))
    bias = torch.randn(48, generator=generator).to(dtype)
    x = torch.randn(2, 3, 160, generator=generator).to(dtype)
    got = operations.block_product(blocks, Q8_0, 160, dtype, bias)(x)
    exact = x.double() @ numbers(blocks, torch.float32).double().T + bias.double()
    assert got.shape == (2, 3, 48) and got.dtype == dtype
    torch.testing.assert_close(got.double(), exact, rtol=0, atol=0.15 if dtype == torch.bfloat16 else 1e-4)
    quantized = (x.double() @ weight.double().T + bias.double() - got.double()).abs().max()
    assert float(quantized) < 0.5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("inner", [32, 64, 96, 1056])
@pytest.mark.parametrize("outputs", [1, 15, 16, 17, 31, 33, 100])
def test_a_product_has_the_bits_of_one_with_plain_numbers(
    kernels: ctypes.CDLL, outputs: int, inner: int, dtype: torch.dtype
) -> None:
    """Around the sizes of tiles, of pieces, and of where weights are unpacked first; rows of wider tensors."""
    wide = random_blocks(outputs + 3, inner // 32 + 2, seed=outputs + inner)
    blocks = wide[2:-1, 34 : 34 + inner // 32 * 34]
    generator = torch.Generator().manual_seed(outputs * inner)
    bias = torch.randn(outputs, generator=generator).to(dtype)
    packed = native.product(kernels, blocks, dtype, bias)
    dense = dense_product(kernels, numbers(blocks, dtype), bias)
    every = torch.randn(300, inner + 7, generator=generator).to(dtype)[:, :inner]
    for rows in (1, 2, 3, 4, 5, 7, 8, 16, 17, 32, 33, 64, 65, 255, 256, 257, 300):
        got = packed(every[:rows])
        assert torch.equal(got, dense(every[:rows])), rows
        assert torch.equal(got[-1:], packed(every[rows - 1 : rows])), rows


def test_no_bias(kernels: ctypes.CDLL) -> None:
    blocks, x = random_blocks(40, 2, seed=1), torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    got = native.product(kernels, blocks, torch.float32)(x)
    assert torch.equal(got, dense_product(kernels, numbers(blocks, torch.float32), None)(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 4, 5, 20, 300])
def test_what_is_no_number_spoils_its_output_alone(kernels: ctypes.CDLL, rows: int, dtype: torch.dtype) -> None:
    blocks = random_blocks(40, 3, seed=2)
    blocks.view(40, 3, 34)[7, 1, :2] = torch.tensor([0x00, 0x7E], dtype=torch.uint8)  # nan
    blocks.view(40, 3, 34)[9, 2, :2] = torch.tensor([0x00, 0x7C], dtype=torch.uint8)  # infinite
    x = torch.randn(rows, 96, generator=torch.Generator().manual_seed(2)).to(dtype)
    got = native.product(kernels, blocks, dtype)(x)
    dense = dense_product(kernels, numbers(blocks, dtype), None)(x)
    assert same(got, dense)
    assert not got[:, 7].isfinite().any() and not got[:, 9].isfinite().any()
    finite = [n for n in range(40) if n not in (7, 9)]
    assert got[:, finite].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_looked_up(operations: Kernels, dtype: torch.dtype) -> None:
    table = random_blocks(50, 5, seed=3)
    ids = torch.tensor([49, 0, 7, 7, 23])
    got = operations.block_rows(table, Q8_0, 160, ids, dtype)
    assert got.shape == (5, 160) and got.dtype == dtype
    assert torch.equal(got, numbers(table, dtype)[ids])
    assert operations.block_rows(table, Q8_0, 160, ids[:0], dtype).shape == (0, 160)
    for missing in (50, -51):
        with pytest.raises(IndexError):
            operations.block_rows(table, Q8_0, 160, torch.tensor([1, missing]), dtype)


def test_matrices_of_matrices_are_dequantized() -> None:
    """Of any shape, and parts of wider rows."""
    wide = random_blocks(12, 4, seed=4).view(3, 4, 136)
    part = wide[:, 1:3, 34:102]
    got = q8_0.dequantize(part, torch.bfloat16)
    assert torch.equal(got, numbers(part, torch.bfloat16)) and got.shape == (3, 2, 64)
