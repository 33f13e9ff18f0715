"""Places that weights are loaded into.

The whole weight is what a file holds. Under tensor parallelism a rank keeps only a share of it, along one dimension or
several; a loader need not read the rest.

    full_shape [8, 6]      shard (slice(4, 8), slice(0, 6))      tensor [4, 6]: the lower half
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stoker_engine.architectures.stored_formats import StoredFormat


@dataclass(frozen=True)
class Shard:
    """What one rank holds of a dimension: positions `start` … `start + size - 1` of `full`."""

    start: int
    size: int
    full: int

    @classmethod
    def whole(cls, size: int) -> Shard:
        """All of a dimension."""
        return cls(0, size, size)

    @property
    def is_whole(self) -> bool:
        """Whether nothing is missing."""
        return self.size == self.full

    @property
    def stop(self) -> int:
        """The position behind its last."""
        return self.start + self.size

    @property
    def positions(self) -> slice:
        """Its positions in the whole."""
        return slice(self.start, self.stop)

    def times(self, size: int) -> Shard:
        """Of a dimension in which each position is `size` positions: a head's rows, say."""
        return Shard(self.start * size, self.size * size, self.full * size)


@dataclass(frozen=True, eq=False)
class WeightTarget:
    """One weight's place in the model.

    Attributes:
        tensor: this rank's share, to be written into. Often a view of something larger; where the weight is stored
            in a format of its own, its shape need not be the weight's.
        full_shape: of the whole weight, in numbers.
        shard: which part of it this is, a slice for each dimension, with both ends stated; None: all of it.
        stored: the format whose blocks `tensor`, uint8, holds instead of numbers; rows follow those of the weight.
    """

    tensor: torch.Tensor
    full_shape: torch.Size
    shard: tuple[slice, ...] | None = None
    stored: StoredFormat | None = None

    @classmethod
    def whole(cls, tensor: torch.Tensor) -> WeightTarget:
        """A target for a weight that this rank holds all of."""
        return cls(tensor, tensor.shape)

    @classmethod
    def of(cls, tensor: torch.Tensor, *shares: Shard, stored: StoredFormat | None = None) -> WeightTarget:
        """A target for these shares of a weight's dimensions."""
        full_shape = torch.Size(share.full for share in shares)
        whole = all(share.is_whole for share in shares)
        return cls(tensor, full_shape, None if whole else tuple(share.positions for share in shares), stored)

    @property
    def inner(self) -> int:
        """How many elements each row has here."""
        return self.full_shape[-1] if self.shard is None else self.shard[-1].stop - self.shard[-1].start

    @property
    def is_empty(self) -> bool:
        """Whether nothing of the weight is here."""
        return not self.tensor.numel()

    def emptied(self) -> WeightTarget:
        """A target for a weight like this one, of which nothing is here."""
        _, *inner_slices = self.shard or tuple(slice(0, size) for size in self.full_shape)
        return WeightTarget(self.tensor[:0], self.full_shape, (slice(0, 0), *inner_slices), self.stored)

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's share of `whole`, a tensor of `full_shape`; a view."""
        return whole if self.shard is None else whole[self.shard]

    def transpose(self, first: int, second: int) -> WeightTarget:
        """The same place, for a weight that files hold with these two dimensions swapped."""
        assert self.stored is None, "a block is part of a row"
        order = list(range(len(self.full_shape)))
        order[first], order[second] = second, first
        shape = torch.Size(self.full_shape[dim] for dim in order)
        shard = None if self.shard is None else tuple(self.shard[dim] for dim in order)
        return WeightTarget(self.tensor.transpose(first, second), shape, shard)
