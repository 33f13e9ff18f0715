"""Collective operations between the ranks of a group, all of which must call the same operations in the same order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class RankLostError(RuntimeError):
    """An operation between ranks failed, for example because another rank has died."""


class Communicator(Protocol):
    """A group of ranks, such as those that share layers (tensor parallelism, Shoeybi et al., 2019).

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
            x: this rank's tensor; all have the same dtype, and the same shape except for the last dimension.
            widths: size of the last dimension of each rank's tensor; None: all equal.
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
