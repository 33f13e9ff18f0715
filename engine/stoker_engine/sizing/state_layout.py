"""How the states of one sequence lie in the blocks of its table.

    states of the layers     │ conv 0 │ ssm 0      │ conv 1 │ ssm 1      │      one run of bytes
    blocks of the table      │ block 9    │ block 4    │ block 7    │            cut where a block ends

The run goes through the blocks in the order of the table, so a tensor may begin in one block and end in another. All
tensors begin at multiples of `ALIGNMENT` and so do blocks: no number is cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from stoker_engine.architectures.cache_spec import StateSpec, StateTensor
from stoker_engine.sizing import dtype_sizes

#: Bytes; a multiple of every number's size, and what vector loads like best.
ALIGNMENT: Final = 16


@dataclass(frozen=True)
class Piece:
    """The part of a tensor that lies in one block.

    Attributes:
        index: of the block in the sequence's table.
        start: first byte in the block.
        stop: the byte after the last one.
    """

    index: int
    start: int
    stop: int


def aligned(size: int) -> int:
    """`size` bytes, rounded up to `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def tensor_bytes(tensor: StateTensor, element_bytes: int) -> int:
    """Bytes of a tensor of one sequence's state, where a number of the model has `element_bytes`."""
    size = element_bytes if tensor.dtype is None else dtype_sizes.element_bytes(tensor.dtype)
    return math.prod(tensor.shape) * size


def state_bytes(spec: StateSpec, element_bytes: int) -> int:
    """Bytes that one layer's state of one sequence takes in the run."""
    return sum(aligned(tensor_bytes(tensor, element_bytes)) for tensor in spec.tensors)


def state_layout(specs: Sequence[StateSpec], element_bytes: int, block_bytes: int) -> list[dict[str, list[Piece]]]:
    """Where each layer's tensors lie, by name, where a block has `block_bytes`."""
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
