"""The stages of a pipeline as processes: each hands what it has computed to the next, over gloo or NCCL.

A tensor is on its way while its sender computes the next step. It is kept until it has arrived, since gloo reads it
from where it lies. The engine has no more steps in flight than one for each stage and one more, so the oldest of as
many tensors has arrived, and nobody waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import distributed

from stoker_engine.parallel.torch_communicator import bytes_of, waiting
from stoker_engine.sizing.pipeline_stages import Stage


class ProcessPipeline:
    """See `parallel.rank_groups.Pipeline`.

    Args:
        members: the ranks of one place in all stages, first to last.
        rank: this one's number.
        group: theirs; nothing else travels in it.
    """

    def __init__(self, members: Sequence[int], rank: int, group: distributed.ProcessGroup) -> None:
        self.stage = Stage(members.index(rank), len(members))
        self._members, self._rank, self._group = members, rank, group
        self._on_their_way: deque[tuple[distributed.Work, torch.Tensor]] = deque()

    def send(self, x: torch.Tensor) -> None:
        """See `Pipeline`.

        Raises:
            RankLostError: the next stage is gone, or does not come in time.
        """
        x = x.contiguous()
        with waiting(self._rank, len(self._members), "send"):
            if len(self._on_their_way) > self.stage.count:
                self._on_their_way.popleft()[0].wait()
            work = distributed.isend(bytes_of(x), dst=self._members[self.stage.index + 1], group=self._group)
        assert work is not None
        self._on_their_way.append((work, x))

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """See `Pipeline`.

        Raises:
            RankLostError: the stage before is gone, or does not come in time.
        """
        x = torch.empty(shape, dtype=dtype, device=device)
        with waiting(self._rank, len(self._members), "receive"):
            work = distributed.irecv(bytes_of(x), src=self._members[self.stage.index - 1], group=self._group)
            assert work is not None
            work.wait()
        return x
