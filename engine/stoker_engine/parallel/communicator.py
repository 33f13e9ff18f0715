"""Collective operations between the ranks that compute a model together, as used by its layers.

All ranks run the same program on the same tokens, each with its shard of the weights. They synchronize only in the
operations below. All ranks must call each operation, in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class RankLostError(RuntimeError):
    """Another rank has died, or did not join an operation in time."""


class Communicator(Protocol):
    """A group of ranks that share the work of each layer (tensor parallelism, Shoeybi et al., 2019).

    Attributes:
        rank: this process's rank in the group, 0 … size - 1.
        size: number of ranks.
    """

    rank: int
    size: int

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' `x`, in the same shape and dtype. The sum may be written into `x`."""
        ...

    def all_gather(self, x: torch.Tensor, widths: Sequence[int] | None = None) -> torch.Tensor:
        """Return all ranks' `x`, concatenated along the last dimension in the order of ranks.

        Args:
            x: this rank's tensor; between ranks only the size of the last dimension may differ.
            widths: size of each rank's last dimension; None: all equal.
        """
        ...

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Return rank 0's `x`. Other ranks pass a tensor of the same shape and dtype, which may be overwritten."""
        ...


class SingleRank:
    """The communicator of a single rank."""

    rank = 0
    size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See `Communicator`."""
        return x

    def all_gather(self, x: torch.Tensor, widths: Sequence[int] | None = None) -> torch.Tensor:
        """See `Communicator`."""
        return x

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """See `Communicator`."""
        return x
