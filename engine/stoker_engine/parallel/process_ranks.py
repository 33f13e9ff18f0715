"""Ranks that are processes of their own, joined by torch.distributed.

Sums are added up here, in the order of ranks and in float32, rather than by the backend's own all-reduce, which cuts
tensors into pieces and adds each in another order: so a row's sum has the same bits on every rank, in every run and in
every batch. What travels are bytes, so that every dtype does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Final

import torch
from torch import distributed

#: Formats in which adding up loses too much.
_NARROW: Final = (torch.bfloat16, torch.float16)


class RankLostError(RuntimeError):
    """Another rank is gone, or did not come to an operation in time."""


class ProcessRanks:
    """See `parallel.ranks.Ranks`. Whoever makes one waits until all ranks have.

    Args:
        rank: this process's number.
        size: how many there are.
        rendezvous: path of a file where they find each other, empty at first, and not used again by others.
        timeout_s: seconds after which a rank that does not come to an operation counts as lost.

    Raises:
        RankLostError: not all ranks came in time.
    """

    def __init__(self, rank: int, size: int, rendezvous: str, timeout_s: float) -> None:
        self.rank, self.size = rank, size
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # not the interface of the host's name, where it has one
        with self._waiting("joining the others"):
            distributed.init_process_group(
                "gloo",
                init_method=f"file://{rendezvous}",
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=timeout_s),
            )

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See `Ranks`."""
        first, *others = self._gather(x, "all_reduce").unbind()
        total = first.float() if x.dtype in _NARROW else first
        for part in others:
            total += part
        return total.to(x.dtype)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """See `Ranks`. The last dimension may differ between ranks."""
        width = x.shape[-1]
        widths = self._gather(torch.tensor([width], device=x.device), "all_gather").flatten().tolist()
        if (widest := max(widths)) != width:
            x = torch.cat((x, x.new_zeros(*x.shape[:-1], widest - width)), dim=-1)
        parts = self._gather(x, "all_gather").unbind()
        return torch.cat([part[..., :width] for part, width in zip(parts, widths, strict=True)], dim=-1)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """See `Ranks`."""
        x = x.contiguous()
        if x.numel():
            with self._waiting("broadcast"):
                distributed.broadcast(_bytes(x), src=0)
        return x

    def close(self) -> None:
        """Leaves the others; nothing can be asked of these ranks after."""
        distributed.destroy_process_group()

    def _gather(self, x: torch.Tensor, operation: str) -> torch.Tensor:
        """All ranks' `x`, which has the same shape on all of them: [size, *shape]."""
        parts = x.new_empty(self.size, *x.shape)
        if x.numel():
            with self._waiting(operation):
                distributed.all_gather_into_tensor(_bytes(parts), _bytes(x.contiguous()))
        return parts

    @contextmanager
    def _waiting(self, operation: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RankLostError(f"rank {self.rank} of {self.size} waited in vain ({operation}): {error}") from error


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor."""
    return x.view(-1).view(torch.uint8)
