"""GPTQ matrices: codes packed along the columns, with scales and zero points of groups of columns.

M.qweight   int32 [inner × bits / 32, outputs]
M.scales    [groups, outputs]
M.qzeros    int32 [groups, outputs × bits / 32]    zero points, packed along the outputs; optional if symmetric
M.g_idx     int [inner]                            group of each column; without it, groups are consecutive columns
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stoker_common.errors import WeightsError
from stoker_engine.architectures.quantization.gptq import GPTQ
from stoker_engine.architectures.stored_formats import GroupFormat
from stoker_engine.quant.checkpoints.components import components, needed
from stoker_engine.quant.checkpoints.grouped_matrix import GroupedMatrix, Packed, Values, check_sizes, scale_of
from stoker_engine.quant.checkpoints.module import Part, Tensors
from stoker_engine.quant.checkpoints.packed_integers import unpack, words_around, words_of
from stoker_engine.quant.checkpoints.tensor_checks import NUMBERS, check_dimensions, check_tensor


def find_modules(config: GPTQ, tensors: Tensors) -> dict[str, GroupedMatrix]:
    """Return all quantized matrices of a checkpoint, by module name.

    Raises:
        WeightsError: tensors of a matrix are missing or inconsistent.
    """
    found = components(tensors.names(), ("qweight", "scales", "qzeros", "g_idx"))
    return {name: _matrix(name, parts, config, tensors) for name, parts in found.items() if "qweight" in parts}


@dataclass(frozen=True)
class Transposed:
    """Values of a matrix that is stored transposed."""

    values: Values

    def read(self, part: Part) -> torch.Tensor:
        """See `Values`."""
        return self.values.read(part[::-1]).t()


@dataclass(frozen=True)
class Stored:
    """A tensor that needs no conversion."""

    tensors: Tensors
    name: str

    def read(self, part: Part) -> torch.Tensor:
        """See `Values`."""
        return self.tensors.read(self.name, part)


@dataclass(frozen=True)
class _Zeros:
    """Zero points; see `Values`.

    Attributes:
        bits: bits of a zero point.
        outputs: rows of the matrix.
        less_one: whether the stored values are one less than the zero points.
        by_word: whether the 1 was subtracted from packed words, so that a zero point of 0 borrows from the next one in
            its word; otherwise it was subtracted from each zero point. Only relevant if `less_one`.
    """

    tensors: Tensors
    name: str
    bits: int
    outputs: int
    less_one: bool
    by_word: bool

    def read(self, part: Part) -> torch.Tensor:
        """See `Values`."""
        outputs, groups = part
        words, first = words_around(outputs, self.bits, False, words_of(self.outputs, self.bits, False))
        packed = self.tensors.read(self.name, (groups, words))
        if self.less_one and self.by_word:
            packed = packed + sum(1 << shift for shift in range(0, 31, self.bits))
        zeros = unpack(packed, self.bits, False)[:, outputs.start - first : outputs.stop - first].t()
        return zeros + 1 & (1 << self.bits) - 1 if self.less_one and not self.by_word else zeros


@dataclass(frozen=True)
class Symmetric:
    """Scales of symmetric groups whose file has redundant zero points, each half of the codes' range; see `Values`.

    Attributes:
        name: name of the tensor with the zero points.
        half: expected value of each zero point.
        remedy: what the error message suggests to set if a zero point differs.
    """

    scales: Values
    zeros: Values
    name: str
    half: int
    remedy: str

    def read(self, part: Part) -> torch.Tensor:
        """See `Values`."""
        if bool((self.zeros.read(part) != self.half).any()):
            raise WeightsError(
                f"{self.name} holds zero points other than {self.half}, although config.json states none; "
                f"set {self.remedy} in its quantization_config"
            )
        return self.scales.read(part)


def _matrix(name: str, parts: dict[str, str], config: GPTQ, tensors: Tensors) -> GroupedMatrix:
    settings = config.settings_of(name)
    if settings is None:
        raise WeightsError(
            f"{name} is quantized, but config.json's quantization_config excludes it; correct config.json"
        )
    bits, packed = settings.bits, parts["qweight"]
    check_dimensions(tensors, packed, 2)
    words, outputs = tensors.shape(packed)
    inner = words * 32 // bits
    if "g_idx" in parts:
        check_dimensions(tensors, parts["g_idx"], 1)
        inner = tensors.shape(parts["g_idx"])[0]
    check_sizes(name, (outputs, inner))
    check_tensor(tensors, packed, (words_of(inner, bits, False), outputs), torch.int32)
    groups = settings.format(inner).groups(inner)
    check_tensor(tensors, needed(name, parts, "scales"), (groups, outputs), *NUMBERS)
    order = _order(parts["g_idx"], tensors, settings.format(inner), inner) if "g_idx" in parts else None
    format = settings.format(inner, scale_of(tensors, parts["scales"]), order is None)
    scales: Values = Transposed(Stored(tensors, parts["scales"]))
    zeros = None
    if not settings.symmetric or "qzeros" in parts:
        check_tensor(tensors, needed(name, parts, "qzeros"), (groups, words_of(outputs, bits, False)), torch.int32)
        by_word = config.zeros_by_word and bits != 3
        zeros = _Zeros(tensors, parts["qzeros"], bits, outputs, config.zeros_less_one, by_word)
        if settings.symmetric:
            scales, zeros = Symmetric(scales, zeros, parts["qzeros"], 1 << bits - 1, '"sym": false'), None
    codes = Transposed(Packed(tensors, packed, bits, inner, dim=-2))
    shape = torch.Size((outputs, inner))
    return GroupedMatrix(name, shape, format, frozenset(parts.values()), codes, scales, zeros, order=order)


def _order(name: str, tensors: Tensors, format: GroupFormat, inner: int) -> torch.Tensor | None:
    """Return the columns in the order of their groups, int64 [inner]; None if they are in that order already.

    Raises:
        WeightsError: the tensor has a wrong shape or dtype, group indices are out of range, or groups have the wrong
            size.
    """
    check_tensor(tensors, name, (inner,), torch.int32, torch.int64)
    stored = tensors.read(name).long()
    size = format.group or inner
    expected = torch.arange(inner) // size
    if torch.equal(stored, expected):
        return None
    if not torch.equal(stored.sort().values, expected):
        raise WeightsError(
            f"{name} must name {format.groups(inner)} groups of {size} columns each; the file is damaged, or "
            "config.json's group_size does not match the weights"
        )
    return stored.argsort(stable=True)
