"""AWQ matrices: 4-bit codes packed along the rows, eight to a word, with scales and zero points of groups of columns.

M.qweight   int32 [inner, outputs / 8]     from the low bits up: rows 0, 2, 4, 6, 1, 3, 5 and 7 of eight
M.scales    [groups, outputs]
M.qzeros    int32 [groups, outputs / 8]    zero points, packed like codes; optional if config.json states none
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from stoker_engine.architectures.quantization.awq import AWQ
from stoker_engine.quant.checkpoints.components import components, needed
from stoker_engine.quant.checkpoints.gptq import Stored, Symmetric, Transposed
from stoker_engine.quant.checkpoints.grouped_matrix import GroupedMatrix, Packed, Values, check_sizes, scale_of
from stoker_engine.quant.checkpoints.module import Part, Tensors
from stoker_engine.quant.checkpoints.tensor_checks import NUMBERS, check_dimensions, check_tensor

#: Position of each of eight consecutive rows in their word.
_PLACES: Final = [0, 4, 1, 5, 2, 6, 3, 7]


def find_modules(config: AWQ, tensors: Tensors) -> dict[str, GroupedMatrix]:
    """Return all quantized matrices of a checkpoint, by module name.

    Raises:
        WeightsError: tensors of a matrix are missing or inconsistent.
    """
    found = components(tensors.names(), ("qweight", "scales", "qzeros"))
    return {name: _matrix(name, parts, config, tensors) for name, parts in found.items() if "qweight" in parts}


@dataclass(frozen=True)
class _Interleaved:
    """Packed integers of a transposed matrix, whose rows are permuted by `_PLACES`, eight at a time; see `Values`."""

    packed: Packed

    def read(self, part: Part) -> torch.Tensor:
        """See `Values`."""
        outputs, columns = part
        first = outputs.start // 8 * 8
        found = self.packed.read((columns, slice(first, -(-outputs.stop // 8) * 8)))
        rows: torch.Tensor = found.unflatten(-1, (-1, 8))[..., _PLACES].flatten(-2).t()
        return rows[outputs.start - first : outputs.stop - first]


def _matrix(name: str, parts: dict[str, str], config: AWQ, tensors: Tensors) -> GroupedMatrix:
    packed = parts["qweight"]
    check_dimensions(tensors, packed, 2)
    inner, words = tensors.shape(packed)
    outputs = 8 * words
    check_sizes(name, (outputs, inner))
    check_tensor(tensors, packed, (inner, words), torch.int32)
    groups = config.format(inner).groups(inner)
    check_tensor(tensors, needed(name, parts, "scales"), (groups, outputs), *NUMBERS)
    scales: Values = Transposed(Stored(tensors, parts["scales"]))
    zeros: Values | None = None
    if config.zero or "qzeros" in parts:
        check_tensor(tensors, needed(name, parts, "qzeros"), (groups, words), torch.int32)
        zeros = _Interleaved(Packed(tensors, parts["qzeros"], 4, outputs))
        if not config.zero:
            scales, zeros = Symmetric(scales, zeros, parts["qzeros"], 8, '"zero_point": true'), None
    codes = _Interleaved(Packed(tensors, packed, 4, outputs))
    format = config.format(inner, scale_of(tensors, parts["scales"]))
    shape = torch.Size((outputs, inner))
    return GroupedMatrix(name, shape, format, frozenset(parts.values()), codes, scales, zeros)
