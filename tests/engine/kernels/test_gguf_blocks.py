"""Weights in GGUF's types, compared with the gguf library's dequantization, and GEMMs with dequantized weights."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import quantize as gguf_quantize

from stoker_engine.architectures.stored_formats import GGUF_FORMATS, GGUFFormat
from stoker_engine.kernels import gguf_blocks
from stoker_engine.kernels.cpu import gguf_blocks as native
from stoker_engine.kernels.cpu.library import load
from stoker_engine.kernels.cpu.linear import linear as dense_linear

from ...support.engine.gguf_random import SCALES, dequantized, random_blocks, same
from .each_isa import each_isa

DTYPES = (torch.float32, torch.bfloat16)

each_format = pytest.mark.parametrize("format", GGUF_FORMATS.values(), ids=lambda format: format.name)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(params=each_isa())
def kernels(request: pytest.FixtureRequest) -> ctypes.CDLL:
    """Kernels of one ISA; those other than this processor's widest need another compilation."""
    return load(request.param)


def hostile_blocks(format: GGUFFormat, rows: int, blocks: int, seed: int) -> torch.Tensor:
    """Return random bytes, including subnormal, infinite and NaN scales; and a row of zeros."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, 256, (rows, blocks * format.bytes), generator=generator, dtype=torch.uint8)
    drawn[rows // 2] = 0
    return drawn


def every_scale(format: GGUFFormat) -> torch.Tensor:
    """Return blocks [blocks, bytes] with a sample of all float16 scales, the same in all places of a block, with codes
    of all kinds; for MXFP4 with all scale bytes.
    """
    step = 7 if format.numbers < 256 else 37
    scales = torch.cat([torch.arange(0, 1 << 16, step), torch.tensor([0, 1, 0x3FF, 0x400, 0x7BFF, 0x7C00, 0x7E00])])
    scales = torch.cat([scales, scales ^ 0x8000]).to(torch.uint16).view(torch.uint8).view(-1, 2)
    blocks = random_blocks(format, len(scales), 1, seed=len(scales))
    for offset in SCALES.get(format.name, ()):
        blocks[:, offset : offset + 2] = scales
    if format.name == "MXFP4":
        blocks[:, 0] = torch.arange(len(blocks))
    if format.name == "BF16":
        blocks = torch.arange(1 << 16).to(torch.uint16).view(torch.uint8).view(-1, 2)
    return blocks


def test_types_have_the_block_sizes_of_ggml() -> None:
    for name, format in GGUF_FORMATS.items():
        assert GGML_QUANT_SIZES[GGMLQuantizationType[name]] == (format.numbers, format.bytes)
        assert native.TYPES[name] == GGMLQuantizationType[name]
    assert native.TYPES.keys() == GGUF_FORMATS.keys()


@each_format
def test_torch_dequantizes_as_the_gguf_library(format: GGUFFormat) -> None:
    """Blocks may have any shape, be slices of wider rows, and hold any bytes."""
    wide = hostile_blocks(format, 12, 4, seed=4).view(3, 4, -1)
    part = wide[:, 1:3, format.bytes : 3 * format.bytes]
    for blocks in (part, random_blocks(format, 30, 3, seed=5), every_scale(format)):
        for dtype in DTYPES:
            got = gguf_blocks.dequantize(blocks, format, dtype)
            assert got.dtype == dtype and same(got, dequantized(blocks, format, dtype))
    assert gguf_blocks.dequantize(part, format, torch.bfloat16).shape == (3, 2, 2 * format.numbers)
    assert gguf_blocks.dequantize(wide[:0], format, torch.float16).shape == (0, 4, 4 * format.numbers)


@each_format
def test_every_isa_dequantizes_as_the_gguf_library(kernels: ctypes.CDLL, format: GGUFFormat) -> None:
    wide = hostile_blocks(format, 40, 5, seed=6)
    part = wide[1:, format.bytes : 4 * format.bytes]
    for blocks in (part, random_blocks(format, 30, 3, seed=7), every_scale(format)):
        for dtype in DTYPES:
            assert same(native.dequantize(kernels, blocks, format, dtype), dequantized(blocks, format, dtype))


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4", "F16", "BF16"])
def test_gemm_is_close_to_that_of_unquantized_weights(kernels: ctypes.CDLL, name: str) -> None:
    """The weights are quantized by the gguf library (which cannot write the other types)."""
    format = GGUF_FORMATS[name]
    generator = torch.Generator().manual_seed(5)
    weight, x = torch.randn(48, 160, generator=generator), torch.randn(2, 3, 160, generator=generator)
    bias = torch.randn(48, generator=generator)
    packed = np.ascontiguousarray(gguf_quantize(weight.numpy(), GGMLQuantizationType[name])).view(np.uint8)
    got = native.linear(kernels, torch.from_numpy(packed), format, torch.float32, bias)(x)
    assert got.shape == (2, 3, 48)
    exact = x.double() @ weight.double().T + bias.double()
    error = float((got - exact).square().mean().sqrt() / weight.std() / 160**0.5)
    assert error < {"4": 0.15, "5": 0.07, "8": 0.01, "1": 0.003}[name.lstrip("QMXFPB")[0]], error


#: Around the sizes of tiles and pieces.
OUTPUTS = (1, 15, 16, 17, 31, 33, 100)
#: Around the row counts from which matrices are unpacked first, and from which threads also split rows.
ROWS = (1, 2, 3, 4, 5, 7, 8, 16, 17, 33, 65, 257, 300)


@each_dtype
@each_format
def test_gemm_has_the_bits_of_one_with_dequantized_weights(
    kernels: ctypes.CDLL, format: GGUFFormat, dtype: torch.dtype
) -> None:
    """Slices of wider tensors, each row of x alone or in a batch."""
    widths = {1: (1, 31, 32, 33, 63, 97, 576), 32: (1, 2, 3, 33), 256: (1, 2, 3)}[format.numbers]
    for index, outputs in enumerate(OUTPUTS):
        blocks = widths[index % len(widths)]
        wide = random_blocks(format, outputs + 3, blocks + 2, seed=outputs)
        part, inner = wide[2:-1, format.bytes : (1 + blocks) * format.bytes], blocks * format.numbers
        generator = torch.Generator().manual_seed(outputs)
        bias = torch.randn(outputs, generator=generator).to(dtype) if index % 2 else None
        packed = native.linear(kernels, part, format, dtype, bias)
        dense = dense_linear(kernels, dequantized(part, format, dtype), bias)
        every = torch.randn(300, inner + 7, generator=generator).to(dtype)[:, :inner]
        for rows in ROWS:
            got = packed(every[:rows])
            assert torch.equal(got, dense(every[:rows])), (outputs, inner, rows)
            assert torch.equal(got[-1:], packed(every[rows - 1 : rows])), (outputs, inner, rows)


@each_dtype
@each_format
def test_nan_in_a_weight_row_affects_only_its_output(
    kernels: ctypes.CDLL, format: GGUFFormat, dtype: torch.dtype
) -> None:
    """Arbitrary bytes give the GEMM of their values, and do not affect other outputs."""
    blocks = max(2, 96 // format.numbers)
    generator = torch.Generator().manual_seed(2)
    mixed = random_blocks(format, 40, blocks, seed=2)
    mixed[7:20] = hostile_blocks(format, 13, blocks, seed=3)
    plain = dequantized(mixed, format, dtype)
    every = torch.randn(300, plain.shape[1], generator=generator).to(dtype)
    packed, dense = native.linear(kernels, mixed, format, dtype), dense_linear(kernels, plain, None)
    for rows in (1, 2, 4, 5, 20, 300):
        got = packed(every[:rows])
        assert same(got, dense(every[:rows])), rows
        assert got[:, :7].isfinite().all() and got[:, 20:].isfinite().all()
