"""Where a layer that keeps one state of each sequence finds it: in the blocks of the sequence's table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from stoker_engine.sizing.state_layout import Piece


@dataclass(frozen=True)
class PagedTensor:
    """One tensor of a state in the pool of blocks.

    Attributes:
        numbers: the pool, in the tensor's dtype: [blocks, numbers of a block].
        shape: of one sequence's tensor.
        pieces: where it lies in the blocks of a table, in numbers.
    """

    numbers: torch.Tensor
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class StateCache:
    """One layer's states of all sequences (`sizing.state_layout`).

    Attributes:
        tensors: by the names that `StateSpec` gives them.
        group: index of the block tables that the layer goes by (`AttentionMetadata.groups`).
    """

    tensors: Mapping[str, PagedTensor]
    group: int

    def load(self, name: str, tables: torch.Tensor, started: torch.Tensor) -> torch.Tensor:
        """One tensor of some sequences, copied out of their blocks.

        Args:
            tables: [sequences, blocks_per_sequence] integers.
            started: [sequences] bool; False where no token is computed yet. What such blocks hold is not read.

        Returns:
            [sequences, *shape]; zero where not started.
        """
        tensor, rows = self.tensors[name], tables.long()
        parts = [tensor.numbers[rows[:, piece.index], piece.start : piece.stop] for piece in tensor.pieces]
        flat = torch.cat(parts, dim=1)
        # Selected, never multiplied: a new sequence's blocks may hold nan.
        return torch.where(started[:, None], flat, 0).view(-1, *tensor.shape)

    def store(self, name: str, tables: torch.Tensor, values: torch.Tensor) -> None:
        """Writes `values` [sequences, *shape], rounded to the state's dtype, into the sequences' blocks.

        Args:
            tables: [sequences, blocks_per_sequence] integers; no block is named twice.
        """
        tensor, rows = self.tensors[name], tables.long()
        sizes = [piece.stop - piece.start for piece in tensor.pieces]
        parts = values.reshape(len(rows), -1).to(tensor.numbers.dtype).split(sizes, dim=1)
        for piece, part in zip(tensor.pieces, parts, strict=True):
            tensor.numbers[rows[:, piece.index], piece.start : piece.stop] = part
