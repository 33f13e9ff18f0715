"""Random matrices in groups that share a scale: all codes, scales of many sizes, all zero points."""

from __future__ import annotations

import random
from typing import NamedTuple

import torch

from stoker_engine.architectures.stored_formats import Code, GroupFormat, Scale
from stoker_engine.kernels.group_blocks import SCALE_DTYPES, encode

CODES: tuple[Code, ...] = ("uint2", "uint3", "uint4", "uint8", "int8", "fp8_e4m3", "fp8_e5m2", "fp4", "nf4")
SCALES: tuple[Scale, ...] = tuple(SCALE_DTYPES)
#: Group sizes: those of checkpoints, some that are no multiples of a unit, and whole rows.
GROUPS = (16, 32, 48, 64, 128, 0)


def some_formats(count: int, seed: int) -> list[GroupFormat]:
    """Return `count` formats of each code; all group sizes and kinds of scales occur."""
    draw = random.Random(seed)
    formats = []
    for index, code in enumerate(CODES):
        for repetition in range(count):
            zero = code.startswith("uint") and draw.random() < 0.5
            group, scale = GROUPS[(index + repetition) % len(GROUPS)], SCALES[(index + 2 * repetition) % len(SCALES)]
            formats.append(GroupFormat(code, group, scale, zero, draw.random() < 0.3))
    return formats


def name_of(format: GroupFormat) -> str:
    """Return the id of a test's parameter."""
    return f"{format.name}, {format.scale}{' zero' * format.zero}{' row_scale' * format.row_scale}"


class Drawn(NamedTuple):
    """The parts of a matrix, and its values."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    row_scales: torch.Tensor | None
    blocks: torch.Tensor


def random_groups(format: GroupFormat, rows: int, inner: int, seed: int) -> Drawn:
    """Return a matrix with finite values, in memory of exactly its size."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << format.bits, (rows, inner), generator=generator, dtype=torch.uint8)
    if format.code.startswith("fp8"):  # neither infinity nor NaN
        codes[codes & 0x7F >= (0x7C if format.code == "fp8_e5m2" else 0x7F)] ^= 0x30
    shape = (rows, format.groups(inner))
    scales = torch.randn(shape, generator=generator) / 64
    scales *= 2.0 ** torch.randint(-4, 3, shape, generator=generator)
    scales = (scales.abs() if format.scale == "e8m0" else scales).to(SCALE_DTYPES[format.scale])
    zeros = row_scales = None
    if format.zero:
        zeros = torch.randint(0, 1 << format.bits, shape, generator=generator, dtype=torch.uint8)
    if format.row_scale:
        row_scales = torch.rand(rows, generator=generator) + 0.5
    return Drawn(codes, scales, zeros, row_scales, encode(codes, scales, zeros, format, row_scales))
