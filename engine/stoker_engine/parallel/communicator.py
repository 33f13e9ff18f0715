"""The processes that compute one model together, as its layers see them.

Every rank runs the same program on the same tokens and holds a share of the weights. The operations below are the only
places where ranks wait for each other; all ranks must come to each of them, in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class RankLostError(RuntimeError):
    """Another rank is gone, or did not come to an operation in time."""


class Communicator(Protocol):
    """A group of ranks that share each layer's work (tensor parallelism, Shoeybi et al., 2019).

    Attributes:
        rank: this process's number, 0 … size - 1.
        size: how many there are.
    """

    rank: int
    size: int

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' `x`, of the same shape and dtype; may be written into `x`."""
        ...

    def all_gather(self, x: torch.Tensor, widths: Sequence[int] | None = None) -> torch.Tensor:
        """All ranks' `x`, joined along the last dimension in the order of ranks.

        Args:
            x: this rank's; only the last dimension may be another one elsewhere.
            widths: of each rank's last dimension; None: of all as of this one.
        """
        ...

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's `x`; the others give a tensor of the same shape and dtype, which may be written into."""
        ...


class SingleRank:
    """One rank, which waits for nobody."""

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
