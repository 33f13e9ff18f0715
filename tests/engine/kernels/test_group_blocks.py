"""Weights in groups that share a scale, compared with their parts decoded by hand, torch's small floats and the gguf
library's MXFP4; and GEMMs compared with those of dequantized weights.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize as gguf_dequantize
from torch.utils._python_dispatch import TorchDispatchMode

from stoker_engine.architectures.stored_formats import LARGEST_GROUP, Code, GroupFormat
from stoker_engine.kernels import group_blocks
from stoker_engine.kernels.bundle import Kernels
from stoker_engine.kernels.cpu import group_blocks as native
from stoker_engine.kernels.cpu.bundle import cpu_kernels
from stoker_engine.kernels.cpu.isa import usable_isas
from stoker_engine.kernels.cpu.library import load
from stoker_engine.kernels.cpu.linear import linear as dense_linear
from stoker_engine.kernels.reference import REFERENCE

from .each_isa import each_isa
from .group_random import CODES, GROUPS, SCALES, Drawn, name_of, random_groups, some_formats

DTYPES = (torch.float32, torch.bfloat16)

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(params=each_isa())
def kernels(request: pytest.FixtureRequest) -> ctypes.CDLL:
    """Kernels of one ISA; those other than this processor's widest need another compilation."""
    return load(request.param)


@pytest.fixture(params=["reference", "native"])
def operations(request: pytest.FixtureRequest) -> Kernels:
    """Both sets of kernels."""
    return REFERENCE if request.param == "reference" else cpu_kernels(load(usable_isas()[0]))


def meaning(code: Code, byte: int) -> float:
    """Return the value of a code, by its definition."""
    if code == "int8":
        return byte - 256 if byte > 127 else byte
    if code == "fp4":
        exponent, fraction = byte >> 1 & 3, byte & 1
        magnitude = (1 + fraction / 2) * 2.0 ** (exponent - 1) if exponent else fraction / 2
        return -magnitude if byte & 8 else magnitude
    if code.startswith("fp8"):
        dtype = torch.float8_e4m3fn if code == "fp8_e4m3" else torch.float8_e5m2
        return torch.tensor([byte], dtype=torch.uint8).view(dtype).double().item()
    if code == "nf4":
        return quantiles()[byte]
    return byte


def quantiles() -> list[float]:
    """Return QLoRA's quantiles of a normal distribution: seven below 0, 0, and eight above; the outermost are ±1."""
    largest = 0.9677083
    below = -torch.special.ndtri(torch.linspace(largest, 0.5, 8, dtype=torch.float64)[:-1])
    above = torch.special.ndtri(torch.linspace(largest, 0.5, 9, dtype=torch.float64)[:-1])
    all_of_them = torch.cat([below, torch.zeros(1, dtype=torch.float64), above.flip(0)])
    return list(all_of_them / all_of_them.abs().max())


def by_hand(drawn: Drawn, format: GroupFormat) -> torch.Tensor:
    """Dequantize a matrix in float64, one element at a time."""
    rows, inner = drawn.codes.shape
    dequantized = torch.empty(rows, inner, dtype=torch.float64)
    for row in range(rows):
        for at in range(inner):
            group = at // format.group if format.group else 0
            zero = 1 << (format.bits - 1) if format.code.startswith("uint") else 0
            if drawn.zeros is not None:
                zero = int(drawn.zeros[row, group])
            scale = float(drawn.scales[row, group].float())
            if drawn.row_scales is not None:
                scale *= float(drawn.row_scales[row])
            dequantized[row, at] = scale * (meaning(format.code, int(drawn.codes[row, at])) - zero)
    return dequantized


@pytest.mark.parametrize("format", some_formats(7, seed=1), ids=name_of)
def test_dequantized_values_equal_the_definition(format: GroupFormat) -> None:
    for inner in (1, 33, 80):
        drawn = random_groups(format, 2, inner, seed=inner)
        assert drawn.blocks.shape == (2, format.row_bytes(inner)) and drawn.blocks.dtype == torch.uint8
        got = group_blocks.dequantize(drawn.blocks, format, inner, torch.float32)
        # Rounding of float32; nf4's quantiles are known to seven digits.
        tolerance = 1e-6 if format.code == "nf4" else 2.5e-7
        torch.testing.assert_close(got.double(), by_hand(drawn, format), rtol=tolerance, atol=1e-9)
        rounded = group_blocks.dequantize(drawn.blocks, format, inner, torch.bfloat16)
        assert torch.equal(rounded, got.bfloat16())
        assert group_blocks.is_finite(drawn.blocks, format, inner)


def test_mxfp4_equals_that_of_gguf() -> None:
    """GGUF's blocks have the same codes in the same order, each after a scale."""
    generator = torch.Generator().manual_seed(3)
    gguf = torch.randint(0, 256, (7, 5, 17), generator=generator, dtype=torch.uint8)
    gguf[..., 0] = gguf[..., 0].clamp(1, 253)
    codes = torch.cat([gguf[..., 1:] & 15, gguf[..., 1:] >> 4], dim=-1).flatten(1)
    format = GroupFormat("fp4", 32, "e8m0")
    blocks = group_blocks.encode(codes, gguf[..., 0].contiguous(), None, format)
    expected = gguf_dequantize(gguf.flatten(1).numpy().astype(np.uint8), GGMLQuantizationType.MXFP4)
    assert torch.equal(group_blocks.dequantize(blocks, format, 160, torch.float32), torch.from_numpy(expected))


@pytest.mark.parametrize("format", some_formats(4, seed=2), ids=name_of)
def test_dequantize_accepts_stacks_and_slices(format: GroupFormat) -> None:
    drawn = random_groups(format, 12, 50, seed=9)
    wide = torch.cat([drawn.blocks, drawn.blocks], dim=-1).view(3, 4, -1)
    part = wide[:, 1:3, : format.row_bytes(50)]
    flat = group_blocks.dequantize(drawn.blocks, format, 50, torch.float32)
    assert torch.equal(group_blocks.dequantize(part, format, 50, torch.float32), flat.view(3, 4, 50)[:, 1:3])
    assert group_blocks.dequantize(part[:0], format, 50, torch.float16).shape == (0, 2, 50)


@pytest.mark.parametrize("format", some_formats(6, seed=4), ids=name_of)
def test_quantize_rounds_to_the_nearest_code(format: GroupFormat) -> None:
    """No code of a group is closer to the given value than the chosen one; zeros stay zeros."""
    generator = torch.Generator().manual_seed(4)
    weights = torch.randn(3, 2, 100, generator=generator) * 2.0 ** torch.randint(-3, 3, (3, 2, 1), generator=generator)
    weights[1, 0, :60] = 0
    blocks = group_blocks.quantize(weights.bfloat16(), format)
    assert blocks.shape == (3, 2, format.row_bytes(100))
    got = group_blocks.dequantize(blocks, format, 100, torch.float32)
    _, scales, zeros = group_blocks.decode(blocks, format, 100)
    size = format.group or 100
    spread = [each.repeat_interleave(size, -1)[..., :100].unsqueeze(-1) for each in (scales, zeros)]
    values = group_blocks.values(format.code)
    possible = spread[0] * (values[values.isfinite()] - spread[1])
    nearest = (possible - weights.bfloat16().float().unsqueeze(-1)).abs().amin(-1)
    error = (got - weights.bfloat16().float()).abs()
    assert (error <= nearest * 1.001 + 1e-6).all()
    assert (got[1, 0, : 60 // size * size if format.group else 0] == 0).all()


def test_quantization_errors_are_near_the_optimum() -> None:
    """Relative errors of normal values, near the optimum for groups of 32 (4 bits: about 0.08)."""
    weights = torch.randn(64, 1024, generator=torch.Generator().manual_seed(5))

    def error(format: GroupFormat) -> float:
        got = group_blocks.dequantize(group_blocks.quantize(weights, format), format, 1024, torch.float32)
        return float((got - weights).norm() / weights.norm())

    bounds: dict[Code, float] = {
        "uint2": 0.42, "uint3": 0.19, "uint4": 0.09, "uint8": 0.006, "int8": 0.006, "fp8_e4m3": 0.027,
        "fp8_e5m2": 0.053, "fp4": 0.105, "nf4": 0.09,
    }  # fmt: skip
    for code in CODES:
        format = GroupFormat(code, 32, "float16")
        assert bounds[code] / 2 < error(format) < bounds[code], code
        if code.startswith("uint"):
            assert error(replace(format, zero=True)) < bounds[code]
            assert error(replace(format, row_scale=True, scale="fp8_e4m3")) < bounds[code] + 0.02
    # With few codes, the scale may have either sign.
    lopsided = torch.tensor([[-8.0, 7, 3, 1] * 8, [8.0, -7, 3, 1] * 8, [7.0, -7, 3, 1] * 8])
    format = GroupFormat("uint4", 32, "float16")
    assert torch.equal(
        group_blocks.dequantize(group_blocks.quantize(lopsided, format), format, 32, torch.float32), lopsided
    )


@pytest.mark.parametrize("scale", SCALES)
def test_nan_and_infinity_are_found(scale: str) -> None:
    for code in CODES:
        format = GroupFormat(code, 32, scale, row_scale=code == "fp4")  # type: ignore[arg-type]
        drawn = random_groups(format, 4, 96, seed=6)
        at = 4 * format.row_scale + format.header_bytes  # of the second scale
        for bad in (torch.nan, torch.inf, 3e38):
            blocks, dtype = drawn.blocks.clone(), group_blocks.SCALE_DTYPES[format.scale]
            stored = torch.tensor([bad]).to(dtype)
            if not bool(stored.float().isfinite()) or (bad == 3e38 and code not in ("nf4", "fp4")):
                if scale in ("float16", "fp8_e4m3") and bool(stored.float().isfinite()):
                    continue
                blocks[2, at : at + dtype.itemsize] = stored.view(torch.uint8)
                assert not group_blocks.is_finite(blocks, format, 96), (code, bad)
        if format.row_scale:
            blocks = drawn.blocks.clone()
            blocks[1, :4] = torch.tensor([torch.inf]).view(torch.uint8)
            assert not group_blocks.is_finite(blocks, format, 96)
        if code.startswith("fp8"):
            for byte in (0x7F, 0xFF) if code == "fp8_e4m3" else (0x7C, 0x7D, 0xFE):
                blocks = drawn.blocks.clone()
                blocks[3, -1] = byte
                assert not group_blocks.is_finite(blocks, format, 96), byte


@pytest.mark.parametrize("row_scale", [False, True])
def test_values_that_overflow_by_their_zero_point_are_found(row_scale: bool) -> None:
    """1e37 × (c - z) is finite for all codes and zero points of 4 bits."""
    format = GroupFormat("uint4", 32, "float32", zero=True, row_scale=row_scale)
    codes, zeros = torch.zeros(2, 64, dtype=torch.uint8), torch.zeros(2, 2, dtype=torch.uint8)
    scales, ones = torch.full((2, 2), -1e37), torch.ones(2) if row_scale else None
    for zero, expected in ((0, True), (15, True), (33, True), (35, False), (255, False)):
        zeros[1, 1] = zero
        blocks = group_blocks.encode(codes, scales, zeros, format, ones)
        assert bool(group_blocks.dequantize(blocks, format, 64, torch.bfloat16).isfinite().all()) == expected
        assert group_blocks.is_finite(blocks, format, 64) == expected, zero
        assert group_blocks.is_finite(blocks.view(2, 1, -1), format, 64) == expected, zero


class _Largest(TorchDispatchMode):
    """Records the bytes of the largest created tensor; views do not count."""

    bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and not function.is_view:
            self.bytes = max(self.bytes, made.nbytes)
        return made


@pytest.mark.parametrize("code", CODES)
def test_is_finite_takes_little_memory(code: Code) -> None:
    format = GroupFormat(code, 16, "float32")
    blocks = torch.zeros(4096, format.row_bytes(4096), dtype=torch.uint8)
    with _Largest() as largest:
        assert group_blocks.is_finite(blocks, format, 4096)
    assert 0 < largest.bytes <= 1 << 20


@pytest.mark.parametrize("code", CODES)
def test_groups_longer_than_a_row_cover_the_row(code: Code, operations: Kernels) -> None:
    rows = GroupFormat(code, 0, "float32", zero=code.startswith("uint"))
    weights = torch.randn(5, 80, generator=torch.Generator().manual_seed(8))
    blocks = group_blocks.quantize(weights, rows)
    expected = operations.block_rows(blocks, rows, 80, torch.arange(5), torch.float32)
    for group in (80, 96, LARGEST_GROUP):
        format = replace(rows, group=group)
        assert format.for_rows(80) == rows and format.for_rows(group + 1) == format
        with _Largest() as largest:
            assert torch.equal(group_blocks.quantize(weights, format), blocks)
            assert torch.equal(operations.block_rows(blocks, format, 80, torch.arange(5), torch.float32), expected)
            operations.quant_linear(blocks, format, 80, torch.float32)(torch.ones(2, 80))
        assert largest.bytes < 1 << 15


@pytest.mark.parametrize("group", [-16, 24, LARGEST_GROUP + 16, 2**36])
def test_unsupported_group_sizes_are_refused(group: int) -> None:
    with pytest.raises(ValueError, match="no format"):
        GroupFormat("uint4", group, "float32")


def every_scale(format: GroupFormat) -> Drawn:
    """Return [scales, 32] with all byte scales, or a sample of scales with subnormals; with all codes' extremes."""
    drawn = random_groups(format, 254, 32, seed=7)
    dtype = group_blocks.SCALE_DTYPES[format.scale]
    if dtype.itemsize == 1:
        scales = torch.arange(254, dtype=torch.uint8)
        scales[127] = 126  # NaN in e4m3
        scales = scales.view(dtype).unsqueeze(-1)
    else:
        scales = (2.0 ** torch.linspace(-149 if dtype != torch.float16 else -24, 15, 254)).unsqueeze(-1).to(dtype)
    return drawn._replace(
        scales=scales, blocks=group_blocks.encode(drawn.codes, scales, drawn.zeros, format, drawn.row_scales)
    )


@pytest.mark.parametrize("code", CODES)
def test_every_isa_dequantizes_as_torch(kernels: ctypes.CDLL, code: Code) -> None:
    for scale in SCALES:
        for group in GROUPS:
            for zero in (False, True)[: 1 + code.startswith("uint")]:
                for row_scale in (False, True):
                    format = GroupFormat(code, group, scale, zero, row_scale)
                    drawn = [(random_groups(format, 19, inner, seed=inner).blocks, inner) for inner in (1, 17, 176)]
                    if group == 32:
                        drawn.append((every_scale(format).blocks, 32))
                    for blocks, inner in drawn:
                        if not group_blocks.is_finite(blocks, format, inner):
                            continue
                        for dtype in DTYPES:
                            got = native.dequantize(kernels, blocks, format, inner, dtype)
                            expected = group_blocks.dequantize(blocks, format, inner, dtype)
                            assert torch.equal(got, expected), (format, inner, dtype)


#: Around the sizes of tiles and pieces.
OUTPUTS = (1, 15, 16, 17, 31, 33, 100)
#: Around the row counts from which matrices are unpacked first, and from which threads also split rows.
ROWS = (1, 2, 3, 4, 5, 7, 8, 16, 17, 33, 65, 257, 300)
#: Within a unit, around units, and around groups.
WIDTHS = (1, 16, 31, 32, 33, 63, 64, 97, 128, 160, 288, 576)


@each_dtype
@pytest.mark.parametrize("format", some_formats(6, seed=8), ids=name_of)
def test_gemm_has_the_bits_of_one_with_dequantized_weights(
    kernels: ctypes.CDLL, format: GroupFormat, dtype: torch.dtype
) -> None:
    """Slices of wider tensors, each row of x alone or in a batch."""
    for index, outputs in enumerate(OUTPUTS):
        inner = WIDTHS[(index + CODES.index(format.code) + GROUPS.index(format.group)) % len(WIDTHS)]
        drawn = random_groups(format, outputs + 3, inner, seed=outputs)
        part = torch.cat([drawn.blocks[:, :5], drawn.blocks], dim=-1)[2:-1, 5:]
        generator = torch.Generator().manual_seed(outputs)
        bias = torch.randn(outputs, generator=generator).to(dtype) if index % 2 else None
        plain = group_blocks.dequantize(part, format, inner, dtype)
        packed = native.linear(kernels, part, format, inner, dtype, bias)
        dense = dense_linear(kernels, plain, bias)
        every = torch.randn(300, inner + 7, generator=generator).to(dtype)[:, :inner]
        for rows in ROWS if outputs < 100 else ROWS[:-3]:
            got = packed(every[:rows])
            assert torch.equal(got, dense(every[:rows])), (outputs, inner, rows)
            assert torch.equal(got[-1:], packed(every[rows - 1 : rows])), (outputs, inner, rows)


@each_dtype
@pytest.mark.parametrize("code", CODES)
def test_gemm_is_close_to_that_of_unquantized_weights(operations: Kernels, code: Code, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(10)
    weight, x = torch.randn(48, 160, generator=generator), torch.randn(2, 3, 160, generator=generator)
    bias = torch.randn(48, generator=generator)
    format = GroupFormat(code, 32, "float16")
    blocks = group_blocks.quantize(weight, format)
    got = operations.quant_linear(blocks, format, 160, dtype, bias.to(dtype))(x.to(dtype))
    assert got.shape == (2, 3, 48) and got.dtype == dtype
    exact = x.double() @ weight.double().T + bias.double()
    error = float((got - exact).square().mean().sqrt() / weight.std() / 160**0.5)
    assert error < {2: 0.5, 3: 0.25, 4: 0.13, 8: 0.06}[format.bits], error


@each_dtype
def test_lookup_returns_dequantized_rows(operations: Kernels, dtype: torch.dtype) -> None:
    for format in some_formats(1, seed=11):
        drawn = random_groups(format, 50, 150, seed=11)
        ids = torch.tensor([49, 0, 7, 7, 23])
        got = operations.block_rows(drawn.blocks, format, 150, ids, dtype)
        assert torch.equal(got, group_blocks.dequantize(drawn.blocks, format, 150, dtype)[ids])
        assert operations.block_rows(drawn.blocks, format, 150, ids[:0], dtype).shape == (0, 150)
        for missing in (50, -51):
            with pytest.raises(IndexError):
                operations.block_rows(drawn.blocks, format, 150, torch.tensor([1, missing]), dtype)
