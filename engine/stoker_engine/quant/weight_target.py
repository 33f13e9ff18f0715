"""Destinations that weights are loaded into.

Files hold whole weights. Under tensor parallelism a rank keeps a shard, along one or several dimensions; a loader need
not read the other elements.

    full_shape [8, 6]      shard (slice(4, 8), slice(0, 6))      tensor [4, 6]: rows 4 to 7
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stoker_engine.architectures.stored_formats import StoredFormat


@dataclass(frozen=True)
class Shard:
    """One rank's part of a dimension: positions `start` … `start + size - 1` of `full`."""

    start: int
    size: int
    full: int

    @classmethod
    def whole(cls, size: int) -> Shard:
        """Return the shard that covers a whole dimension."""
        return cls(0, size, size)

    @property
    def is_whole(self) -> bool:
        """Whether the shard covers the whole dimension."""
        return self.size == self.full

    @property
    def stop(self) -> int:
        """End of the shard (exclusive)."""
        return self.start + self.size

    @property
    def positions(self) -> slice:
        """The shard as a slice of the whole dimension."""
        return slice(self.start, self.stop)

    def times(self, size: int) -> Shard:
        """Return the shard of a dimension that has `size` positions for each position of this dimension; for example,
        from heads to their rows."""
        return Shard(self.start * size, self.size * size, self.full * size)


@dataclass(frozen=True, eq=False)
class WeightTarget:
    """Destination of one weight in the model.

    Attributes:
        tensor: this rank's shard, which a loader writes; often a view of a larger tensor. Its shape differs from the
            shard's if `stored` is set.
        full_shape: shape of the whole weight, in elements.
        shard: slice of each dimension of the weight, with explicit start and stop; None for the whole weight.
        stored: format of the blocks in `tensor` (uint8), whose rows are those of the shard; None: it holds elements.
    """

    tensor: torch.Tensor
    full_shape: torch.Size
    shard: tuple[slice, ...] | None = None
    stored: StoredFormat | None = None

    @classmethod
    def whole(cls, tensor: torch.Tensor) -> WeightTarget:
        """Return a target for a weight that this rank holds completely."""
        return cls(tensor, tensor.shape)

    @classmethod
    def of(cls, tensor: torch.Tensor, *shares: Shard, stored: StoredFormat | None = None) -> WeightTarget:
        """Return a target for the given shards of a weight's dimensions."""
        full_shape = torch.Size(share.full for share in shares)
        whole = all(share.is_whole for share in shares)
        return cls(tensor, full_shape, None if whole else tuple(share.positions for share in shares), stored)

    @property
    def inner(self) -> int:
        """Number of elements in a row of the shard."""
        return self.full_shape[-1] if self.shard is None else self.shard[-1].stop - self.shard[-1].start

    @property
    def is_empty(self) -> bool:
        """Whether this rank holds nothing of the weight."""
        return not self.tensor.numel()

    def emptied(self) -> WeightTarget:
        """Return an empty target for the same weight: this rank holds none of its rows."""
        _, *inner_slices = self.shard or tuple(slice(0, size) for size in self.full_shape)
        return WeightTarget(self.tensor[:0], self.full_shape, (slice(0, 0), *inner_slices), self.stored)

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of `whole`, a tensor of `full_shape`, as a view."""
        return whole if self.shard is None else whole[self.shard]

    def transpose(self, first: int, second: int) -> WeightTarget:
        """Return this target for a weight that files store with the two dimensions swapped."""
        assert self.stored is None, "a block is part of a row"
        order = list(range(len(self.full_shape)))
        order[first], order[second] = second, first
        shape = torch.Size(self.full_shape[dim] for dim in order)
        shard = None if self.shard is None else tuple(self.shard[dim] for dim in order)
        return WeightTarget(self.tensor.transpose(first, second), shape, shard)
