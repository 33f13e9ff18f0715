"""Quantized matrices with separate tensors of codes, scales and zero points, as most methods store them.

    codes   [outputs, inner]      one in each byte, or several in a word
    scales  [outputs, groups]     or one for each row, for each block of rows and columns, or for the whole matrix

Stacks have an additional leading dimension.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from stoker_common.errors import WeightsError
from stoker_engine.architectures.stored_formats import GroupFormat, Scale
from stoker_engine.kernels.group_blocks import encode
from stoker_engine.quant.checkpoints.module import Part, Tensors
from stoker_engine.quant.checkpoints.packed_integers import unpack, words_around, words_of

#: Stored format of scales, by their dtype in files.
SCALES: Final[dict[torch.dtype, Scale]] = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float8_e8m0fnu: "e8m0",
    torch.float8_e4m3fn: "fp8_e4m3",
}


class Values(Protocol):
    """Values at the positions of a matrix: codes or zero points (uint8), or scales."""

    def read(self, part: Part) -> torch.Tensor:
        """Read the values of a part: slices of rows and columns (or groups), after a slice of matrices for a stack."""
        ...


@dataclass(frozen=True)
class Bytes:
    """One-byte codes, stored as [..., outputs, inner].

    Attributes:
        shift: added to each code, modulo 256.
        bits: largest number of bits of a shifted code.
    """

    tensors: Tensors
    name: str
    shift: int = 0
    bits: int = 8

    def read(self, part: Part) -> torch.Tensor:
        """See `Values`."""
        return _shifted(self.name, self.tensors.read(self.name, part), self.shift, self.bits)


def _shifted(name: str, stored: torch.Tensor, shift: int, bits: int) -> torch.Tensor:
    """Add `shift` to each byte, modulo 256.

    Raises:
        WeightsError: a result has more than `bits` bits.
    """
    found = stored.view(torch.uint8)
    found = found + shift if shift else found
    if bits < 8 and found.numel() and int(found.max()) >> bits:
        raise WeightsError(f"{name} holds integers of more than {bits} bits; download the file again")
    return found


@dataclass(frozen=True)
class Packed:
    """Integers of `bits` bits, packed along dimension `dim`: words hold neighbours of a row (-1) or of a column (-2).

    Attributes:
        numbers: number of integers along that dimension.
        padded: see `packed_integers`.
        shift: added to each integer, modulo 256.
    """

    tensors: Tensors
    name: str
    bits: int
    numbers: int
    padded: bool = False
    dim: int = -1
    shift: int = 0

    def read(self, part: Part) -> torch.Tensor:
        """See `Values`."""
        numbers = part[self.dim]
        words, first = words_around(numbers, self.bits, self.padded, words_of(self.numbers, self.bits, self.padded))
        around = list(part)
        around[self.dim] = words
        found = unpack(self.tensors.read(self.name, tuple(around)).transpose(self.dim, -1), self.bits, self.padded)
        found = found[..., numbers.start - first : numbers.stop - first].transpose(self.dim, -1)
        return found + self.shift if self.shift else found


@dataclass(frozen=True)
class Pairs:
    """4-bit codes, two in a byte, the low half first: uint8 [..., outputs, inner / 2]."""

    tensors: Tensors
    name: str

    def read(self, part: Part) -> torch.Tensor:
        """See `Values`."""
        *leading, columns = part
        found = self.tensors.read(self.name, (*leading, slice(columns.start // 2, -(-columns.stop // 2))))
        first = columns.start % 2
        codes = torch.stack([found & 15, found >> 4], dim=-1).flatten(-2)
        return codes[..., first : first + columns.stop - columns.start]


@dataclass(frozen=True)
class Grid:
    """Scales or zero points of blocks: [..., outputs / `rows`, groups].

    Attributes:
        shape: expected shape; the tensor's shape may have fewer or more dimensions of size 1.
        rows: rows of the matrix that share a value.
        zero_bits: bits of signed zero points, to which half of their range is added; 0 for scales.
    """

    tensors: Tensors
    name: str
    shape: tuple[int, ...]
    rows: int = 1
    zero_bits: int = 0

    @classmethod
    def of(cls, tensors: Tensors, name: str, shape: Sequence[int], rows: int, groups: int, zero_bits: int = 0) -> Grid:
        """Return the grid of a matrix of `shape` with `groups` values for each block of `rows` rows (0: all rows).

        Raises:
            WeightsError: the tensor has a different shape.
        """
        *stack, outputs, _ = shape
        rows = rows or outputs
        needed_shape = (*stack, -(-outputs // rows), groups)
        stored = tensors.shape(name)
        if _without_ones(stored) != _without_ones(needed_shape):
            raise WeightsError(
                f"{name} has shape {tuple(stored)}, but its matrix of {tuple(shape)} needs {needed_shape}"
            )
        return cls(tensors, name, needed_shape, rows, zero_bits)

    def read(self, part: Part) -> torch.Tensor:
        """See `Values`; `part` has slices of rows and of groups."""
        *stack, rows, groups = part
        blocks = slice(rows.start // self.rows, -(-rows.stop // self.rows))
        cuts = [
            slice(0, 1) if size == 1 else cut for size, cut in zip(self.shape, (*stack, blocks, groups), strict=True)
        ]
        longer = (cut for size, cut in zip(self.shape, cuts, strict=True) if size != 1)
        stored = tuple(slice(0, 1) if size == 1 else next(longer) for size in self.tensors.shape(self.name))
        found = self.tensors.read(self.name, stored or None).reshape([cut.stop - cut.start for cut in cuts])
        if self.zero_bits:
            found = _shifted(self.name, found, 1 << (self.zero_bits - 1), self.zero_bits)
        if self.rows > 1:
            found = found[..., torch.arange(rows.start, rows.stop) // self.rows - blocks.start, :]
        return found


def _without_ones(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size != 1]


@dataclass(frozen=True)
class GroupedMatrix:
    """See `StoredModule`.

    Attributes:
        name: name of the module.
        codes: uint8, by rows and columns.
        scales: scales, by rows and groups.
        zeros: uint8 zero points, by rows and groups; None for symmetric quantization.
        row_scale: second-level scale of each matrix, [..., 1, 1]; None if there is none.
        row_scale_divides: whether scales are divided by `row_scale` instead of multiplied.
        order: columns in the order of their groups; None if they are not reordered.
    """

    name: str
    shape: torch.Size
    format: GroupFormat
    tensors: frozenset[str]
    codes: Values
    scales: Values
    zeros: Values | None = None
    row_scale: Values | None = None
    row_scale_divides: bool = False
    order: torch.Tensor | None = None

    def rows(self, part: Part) -> torch.Tensor:
        """See `StoredModule`."""
        *leading, columns = part
        group = self.format.group
        check_cut(self.name, self.format, columns, self.shape[-1], whole=self.order is not None)
        groups = slice(columns.start // group, -(-columns.stop // group)) if group else slice(0, 1)
        by_group = (*leading, groups)
        codes = self.codes.read(part)
        if self.order is not None:
            codes = codes[..., self.order]
        *code_shape, _ = codes.shape
        scales = self.scales.read(by_group).expand(*code_shape, groups.stop - groups.start)
        zeros = None if self.zeros is None else self.zeros.read(by_group).expand(scales.shape)
        row_scales = None
        if self.row_scale is not None:
            whole = (*leading[:-1], slice(0, self.shape[-2]), slice(0, 1))
            row_scales = self.row_scale.read(whole)[..., :1, 0].float()
            if not bool(row_scales.isfinite().all()):
                raise WeightsError(f"{self.name} has a scale that is not finite; download the model again")
            row_scales = (row_scales.reciprocal() if self.row_scale_divides else row_scales).expand(code_shape)
        return encode(codes, scales, zeros, self.format, row_scales)

    def columns(self) -> torch.Tensor | None:
        """See `StoredModule`."""
        return self.order


def check_cut(name: str, format: GroupFormat, columns: slice, inner: int, *, whole: bool = False) -> None:
    """Check that the matrix called `name`, with rows of `inner` elements, can be split at these columns.

    Args:
        whole: whether columns are reordered, so that they cannot be split.

    Raises:
        WeightsError: the split is not possible.
    """
    group = format.group
    within = group and (columns.start % group or (columns.stop % group and columns.stop != inner))
    if within or (whole and columns != slice(0, inner)):
        raise WeightsError(
            f"{name} is stored in {format.name} and cannot be split at columns {columns.start} and "
            f"{columns.stop}; choose a --tensor-parallel-size that does not split its groups"
        )


def check_sizes(name: str, shape: Sequence[int]) -> None:
    """Check that `shape` is that of a matrix, or of a stack of matrices, with at least one element.

    Raises:
        WeightsError: it is not.
    """
    if len(shape) not in (2, 3) or math.prod(shape) < 1:
        raise WeightsError(f"{name} has shape {tuple(shape)}, which is not a matrix; download the file again")


def scale_of(tensors: Tensors, name: str) -> Scale:
    """Return the format of the scales in the tensor `name`; uint8 holds exponents of powers of two.

    Raises:
        WeightsError: the dtype is not valid for scales.
    """
    dtype = tensors.dtype(name)
    if dtype == torch.uint8:
        return "e8m0"
    if dtype is None or dtype not in SCALES:
        raise WeightsError(f"{name} holds {dtype_name(dtype)}, which is not valid for scales; download the file again")
    return SCALES[dtype]


def scale_of_all(tensors: Tensors, name: str, shape: Sequence[int]) -> Grid:
    """Return the second-level scale of a matrix of `shape`, or of each matrix of a stack.

    Raises:
        WeightsError: the tensor has a different shape, or a dtype that is not valid for scales.
    """
    if (dtype := tensors.dtype(name)) not in (torch.float32, torch.float16, torch.bfloat16):
        raise WeightsError(f"{name} holds {dtype_name(dtype)}, which is not valid for scales; download the file again")
    return Grid.of(tensors, name, shape, 0, 1)


def is_integer(tensors: Tensors, name: str) -> bool:
    """Whether a tensor holds signed integers."""
    return tensors.dtype(name) in (torch.int8, torch.int16, torch.int32, torch.int64)


def dtype_name(dtype: torch.dtype | None) -> str:
    """Return the name of a dtype for messages."""
    return "a dtype that torch lacks" if dtype is None else str(dtype).removeprefix("torch.")
