"""Communication between rank processes by torch.distributed.

On the CPU, sums are computed here in the order of ranks, so that a row's sum has the same bits on every rank, in every
run and in every batch. The backend's all-reduce would split tensors and add each piece in another order.
Except for NCCL's sums, tensors are transferred as bytes, so that all dtypes are supported.
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

#: Backends by device. ROCm's RCCL is called nccl, too.
_BACKENDS: Final = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"

#: Dtypes that are summed in float32 on the CPU; other dtypes are summed as they are.
_NARROW: Final = (torch.bfloat16, torch.float16)


class TorchCommunicator:
    """See `parallel.communicator.Communicator`: a group of the processes of a `World`."""

    def __init__(self, members: Sequence[int], rank: int, group: distributed.ProcessGroup) -> None:
        self.rank, self.size = members.index(rank), len(members)
        self._first, self._group = members[0], group

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See `Communicator`. On accelerators NCCL computes the sum. Its order, and so the last bits, may depend on the
        size of `x`."""
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
        """See `Communicator`. Narrower tensors are padded for the transfer."""
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
        """Return all ranks' `x`, which must have equal shapes: [size, *shape]."""
        parts = x.new_empty(self.size, *x.shape)
        if x.numel():
            with self._waiting(operation):
                distributed.all_gather_into_tensor(bytes_of(parts), bytes_of(x.contiguous()), group=self._group)
        return parts

    def _waiting(self, operation: str) -> AbstractContextManager[None]:
        return waiting(self.rank, self.size, operation)


class World:
    """All ranks of an engine. The constructor waits until all ranks have joined.

    Args:
        rendezvous: ``file://PATH`` of an empty file used by these ranks only; or, for ranks on several machines,
            ``tcp://HOST:PORT`` of a `TCPStore`.
        timeout_s: seconds after which a rank that does not join an operation counts as lost.

    Raises:
        RankLostError: not all ranks joined in time.
    """

    def __init__(self, rank: int, size: int, rendezvous: str, timeout_s: float) -> None:
        self.rank, self.size = rank, size
        self._made: list[TorchCommunicator] = []
        url, timeout = urlsplit(rendezvous), timedelta(seconds=timeout_s)
        with waiting(rank, size, "joining the others"):
            if url.scheme == "tcp":
                host, port = str(url.hostname), int(url.port or 0)
                # TCPStore resolves addresses to names, which takes 20 s each if no name server answers.
                os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")
                if "GLOO_SOCKET_IFNAME" not in os.environ:
                    os.environ["GLOO_SOCKET_IFNAME"] = interface_towards(host)
                os.environ.setdefault("NCCL_SOCKET_IFNAME", os.environ["GLOO_SOCKET_IFNAME"])
                store: Store = TCPStore(host, port, is_master=False, timeout=timeout)
            else:
                os.environ.setdefault(
                    "GLOO_SOCKET_IFNAME", "lo"
                )  # by default gloo uses the interface of the host's name
                store = FileStore(url.path, size)
            distributed.init_process_group(_BACKENDS, store=store, rank=rank, world_size=size, timeout=timeout)

    def ranks(self, groups: Sequence[Sequence[int]]) -> TorchCommunicator:
        """Return the communicator of this rank's group. All ranks must pass the same disjoint `groups`."""
        members, group = self.group_of(groups)
        self._made.append(TorchCommunicator(members, self.rank, group))
        return self._made[-1]

    def group_of(self, groups: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], distributed.ProcessGroup]:
        """Return the members and the process group of this rank's group. All ranks must pass the same disjoint
        `groups`."""
        made = {tuple(members): self._group(members) for members in groups}
        own_group = next(members for members in made if self.rank in members)
        return own_group, made[own_group]

    def close(self) -> None:
        """Disconnect from the other ranks. The communicators can no longer be used."""
        for ranks in self._made:
            del ranks._group  # a remaining reference would keep the process group alive
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
        return made  # type: ignore[return-value]  # for other groups torch returns an int, which is not used


@contextmanager
def waiting(rank: int, size: int, operation: str) -> Iterator[None]:
    """Convert torch's errors in the block, because most mean that another rank is lost.

    Raises:
        RankLostError: torch raised a RuntimeError.
    """
    try:
        yield
    except RuntimeError as error:
        raise RankLostError(
            f"rank {rank} of {size} could not complete an operation with the other ranks ({operation}): {error}"
        ) from error


def bytes_of(x: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as a view of uint8 [bytes]."""
    return x.view(-1).view(torch.uint8)
