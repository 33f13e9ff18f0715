"""Ranks that are processes of their own, joined by torch.distributed.

Sums are added up here, in the order of ranks and in float32, rather than by the backend's own all-reduce, which cuts
tensors into pieces and adds each in another order: so a row's sum has the same bits on every rank, in every run and in
every batch. What travels are bytes, so that every dtype does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Final
from urllib.parse import urlsplit

import torch
from torch import distributed
from torch._C._distributed_c10d import FileStore, Store, TCPStore

from stoker_engine.nodes.addresses import interface_towards
from stoker_engine.parallel.communicator import RankLostError

#: What joins tensors, by their device. ROCm's RCCL goes by NCCL's name.
_BACKENDS: Final = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"

#: Formats in which adding up loses too much.
_NARROW: Final = (torch.bfloat16, torch.float16)


class TorchCommunicator:
    """See `parallel.communicator.Communicator`: some of the processes of a `World`."""

    def __init__(self, members: Sequence[int], rank: int, group: distributed.ProcessGroup) -> None:
        self.rank, self.size = members.index(rank), len(members)
        self._first, self._group = members[0], group

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See `Communicator`. Accelerators add up as NCCL does: the order, and so the last bit, depends on the size of
        `x`."""
        if x.is_cuda:
            x = x.contiguous()
            with self._waiting("all_reduce"):
                distributed.all_reduce(x, group=self._group)
            return x
        first, *rest = self._gather(x, "all_reduce").unbind()
        total = first.float() if x.dtype in _NARROW else first
        for part in rest:
            total += part
        return total.to(x.dtype)

    def all_gather(self, x: torch.Tensor, widths: Sequence[int] | None = None) -> torch.Tensor:
        """See `Communicator`. What is narrower than others' travels with zeros."""
        widths = widths or [x.shape[-1]] * self.size
        x = torch.nn.functional.pad(x, (0, max(widths) - x.shape[-1]))
        parts = self._gather(x, "all_gather").unbind()
        return torch.cat([part[..., :width] for part, width in zip(parts, widths, strict=True)], dim=-1)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """See `Communicator`."""
        x = x.contiguous()
        if x.numel():
            with self._waiting("broadcast"):
                distributed.broadcast(bytes_of(x), src=self._first, group=self._group)
        return x

    def _gather(self, x: torch.Tensor, operation: str) -> torch.Tensor:
        """All ranks' `x`, which has the same shape on all of them: [size, *shape]."""
        parts = x.new_empty(self.size, *x.shape)
        if x.numel():
            with self._waiting(operation):
                distributed.all_gather_into_tensor(bytes_of(parts), bytes_of(x.contiguous()), group=self._group)
        return parts

    def _waiting(self, operation: str) -> AbstractContextManager[None]:
        return waiting(self.rank, self.size, operation)


class World:
    """All ranks of an engine. Its constructor waits until all ranks have one.

    Args:
        rank: this process's number.
        size: how many there are.
        rendezvous: URL of where they find each other: ``file://PATH``, of a file that is empty at first and is not
            used again by others; or ``tcp://HOST:PORT``, of a `TCPStore`, where they are on several machines.
        timeout_s: seconds after which a rank that does not come to an operation counts as lost.

    Raises:
        RankLostError: not all ranks came in time.
    """

    def __init__(self, rank: int, size: int, rendezvous: str, timeout_s: float) -> None:
        self.rank, self.size = rank, size
        self._made: list[TorchCommunicator] = []
        url, timeout = urlsplit(rendezvous), timedelta(seconds=timeout_s)
        with waiting(rank, size, "joining the others"):
            if url.scheme == "tcp":
                host, port = str(url.hostname), int(url.port or 0)
                # The store asks for the name of each address, and where no name server answers it waits 20 s each time.
                os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")
                if "GLOO_SOCKET_IFNAME" not in os.environ:
                    os.environ["GLOO_SOCKET_IFNAME"] = interface_towards(host)
                os.environ.setdefault("NCCL_SOCKET_IFNAME", os.environ["GLOO_SOCKET_IFNAME"])
                store: Store = TCPStore(host, port, is_master=False, timeout=timeout)
            else:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # not the interface of the host's name, if it has one
                store = FileStore(url.path, size)
            distributed.init_process_group(_BACKENDS, store=store, rank=rank, world_size=size, timeout=timeout)

    def ranks(self, groups: Sequence[Sequence[int]]) -> TorchCommunicator:
        """Those of `groups`, which name each rank once, that this rank is in. All ranks ask for the same groups."""
        members, group = self.group_of(groups)
        self._made.append(TorchCommunicator(members, self.rank, group))
        return self._made[-1]

    def group_of(self, groups: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], distributed.ProcessGroup]:
        """Of `groups`, which name each rank once, the members of the one that this rank is in, and what joins them.
        All ranks ask for the same groups."""
        made = {tuple(members): self._group(members) for members in groups}
        own_group = next(members for members in made if self.rank in members)
        return own_group, made[own_group]

    def close(self) -> None:
        """Leaves the others; nothing can be asked of these ranks after."""
        for ranks in self._made:
            del ranks._group  # what they hold lives on
        self._made.clear()
        if distributed.is_initialized():
            distributed.destroy_process_group()

    def _group(self, members: Sequence[int]) -> distributed.ProcessGroup:
        if len(members) == self.size:
            group = distributed.group.WORLD
            assert group is not None
            return group
        with waiting(self.rank, self.size, "joining the others"):
            made = distributed.new_group(list(members))
        assert isinstance(made, distributed.ProcessGroup) or self.rank not in members
        return made  # type: ignore[return-value]  # of a group that this rank is not in: a number, which nobody uses


@contextmanager
def waiting(rank: int, size: int, operation: str) -> Iterator[None]:
    """What torch raises meanwhile is the loss of another rank.

    Raises:
        RankLostError: instead.
    """
    try:
        yield
    except RuntimeError as error:
        raise RankLostError(f"rank {rank} of {size} waited in vain ({operation}): {error}") from error


def bytes_of(x: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor."""
    return x.view(-1).view(torch.uint8)
