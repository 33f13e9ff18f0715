"""Places that weights are loaded into.

The whole weight is what a file holds. Under tensor parallelism a rank keeps only a part of it, cut along one dimension
or several; a loader need not read the rest.

    full_shape [8, 6]      shard (slice(4, 8), slice(0, 6))      tensor [4, 6]: the lower half
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class Slot:
    """One weight's place in the model.

    Attributes:
        tensor: this rank's part, to be written into. Often a view of something larger.
        full_shape: of the whole weight, in numbers.
        shard: which part of it this is, a slice for each dimension, with both ends stated; None: all of it.
    """

    tensor: torch.Tensor
    full_shape: torch.Size
    shard: tuple[slice, ...] | None = None

    @classmethod
    def whole(cls, tensor: torch.Tensor) -> Slot:
        """A slot for a weight that this rank holds all of."""
        return cls(tensor, tensor.shape)

    @classmethod
    def cut(cls, tensor: torch.Tensor, dim: int, start: int, size: int) -> Slot:
        """A slot for the part of a weight that begins at `start` along `dim`, where the whole has `size`."""
        shape, shard = list(tensor.shape), [slice(0, length) for length in tensor.shape]
        shard[dim] = slice(start, start + shape[dim])
        shape[dim] = size
        return cls(tensor, torch.Size(shape), tuple(shard) if size != tensor.shape[dim] else None)

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of `whole`, a tensor of `full_shape`; a view."""
        return whole if self.shard is None else whole[self.shard]

    def transpose(self, first: int, second: int) -> Slot:
        """The same place, for a weight that files hold with these two dimensions swapped."""

        def swapped(items: tuple[slice, ...]) -> tuple[slice, ...]:
            out = list(items)
            out[first], out[second] = out[second], out[first]
            return tuple(out)

        shape = list(self.full_shape)
        shape[first], shape[second] = shape[second], shape[first]
        shard = None if self.shard is None else swapped(self.shard)
        return Slot(self.tensor.transpose(first, second), torch.Size(shape), shard)
