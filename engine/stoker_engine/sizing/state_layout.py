"""Layout of a sequence's states in the blocks of its block table.

    states of the layers     │ conv 0 │ ssm 0      │ conv 1 │ ssm 1      │      one byte range
    blocks of the table      │ block 9    │ block 4    │ block 7    │            split at block ends

The byte range runs through the blocks in the order of the table, so a tensor may span several blocks. Tensors and
blocks begin at multiples of `ALIGNMENT`, so no element is split.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from stoker_engine.architectures.cache_spec import StateSpec, StateTensor
from stoker_engine.sizing import dtype_sizes

#: Alignment in bytes: a multiple of every element size, and suited to vector loads.
ALIGNMENT: Final = 16


@dataclass(frozen=True)
class Piece:
    """The part of a tensor that lies in one block.

    Attributes:
        index: index of the block in the sequence's table.
        start: offset of the first byte in the block.
        stop: offset after the last byte.
    """

    index: int
    start: int
    stop: int


def aligned(size: int) -> int:
    """Round `size` bytes up to `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def tensor_bytes(tensor: StateTensor, element_bytes: int) -> int:
    """Return the bytes of a tensor of one sequence's state; `element_bytes` is the size of the model's dtype."""
    size = element_bytes if tensor.dtype is None else dtype_sizes.element_bytes(tensor.dtype)
    return math.prod(tensor.shape) * size


def state_bytes(spec: StateSpec, element_bytes: int) -> int:
    """Return the bytes of one sequence's state in one layer, including alignment."""
    return sum(aligned(tensor_bytes(tensor, element_bytes)) for tensor in spec.tensors)


def state_layout(specs: Sequence[StateSpec], element_bytes: int, block_bytes: int) -> list[dict[str, list[Piece]]]:
    """Return the pieces of each layer's tensors by name, for blocks of `block_bytes`."""
    assert block_bytes % ALIGNMENT == 0
    layout, start = [], 0
    for spec in specs:
        pieces = {}
        for tensor in spec.tensors:
            size = tensor_bytes(tensor, element_bytes)
            pieces[tensor.name] = _pieces(start, start + size, block_bytes)
            start += aligned(size)
        layout.append(pieces)
    return layout


def _pieces(start: int, stop: int, block_bytes: int) -> list[Piece]:
    pieces = []
    for index in range(start // block_bytes, -(-stop // block_bytes)):
        first = index * block_bytes
        pieces.append(Piece(index, max(start - first, 0), min(stop - first, block_bytes)))
    return pieces
