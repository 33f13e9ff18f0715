"""Access to the states of layers that keep one state per sequence, stored in the blocks of the sequence's table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from stoker_engine.sizing.state_layout import Piece


@dataclass(frozen=True)
class PagedTensor:
    """One tensor of a state in the block pool.

    Attributes:
        numbers: the pool, viewed in the tensor's dtype: [blocks, elements per block].
        shape: shape of one sequence's tensor.
        pieces: positions of the tensor in the blocks of a table; offsets in elements, not bytes.
    """

    numbers: torch.Tensor
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class StateCache:
    """States of all sequences in one layer (`sizing.state_layout`).

    Attributes:
        tensors: tensors by their name in `StateSpec`.
        group: index of the layer's block tables (`AttentionMetadata.groups`).
    """

    tensors: Mapping[str, PagedTensor]
    group: int

    def load(self, name: str, tables: torch.Tensor, started: torch.Tensor) -> torch.Tensor:
        """Copy one tensor of some sequences out of their blocks.

        Args:
            tables: [sequences, blocks_per_sequence] integer block numbers.
            started: [sequences] bool: whether any token of the sequence has been computed. If not, the contents of its
                blocks are ignored.

        Returns:
            [sequences, *shape]; zero for sequences that have not started.
        """
        tensor, rows = self.tensors[name], tables.long()
        parts = [tensor.numbers[rows[:, piece.index], piece.start : piece.stop] for piece in tensor.pieces]
        flat = torch.cat(parts, dim=1)
        # Select instead of multiplying by 0: a new sequence's blocks may contain NaN.
        return torch.where(started[:, None], flat, 0).view(-1, *tensor.shape)

    def store(self, name: str, tables: torch.Tensor, values: torch.Tensor) -> None:
        """Write `values` [sequences, *shape], rounded to the state's dtype, into the sequences' blocks.

        Args:
            tables: [sequences, blocks_per_sequence] integer block numbers, all different.
        """
        tensor, rows = self.tensors[name], tables.long()
        sizes = [piece.stop - piece.start for piece in tensor.pieces]
        parts = values.reshape(len(rows), -1).to(tensor.numbers.dtype).split(sizes, dim=1)
        for piece, part in zip(tensor.pieces, parts, strict=True):
            tensor.numbers[rows[:, piece.index], piece.start : piece.stop] = part
