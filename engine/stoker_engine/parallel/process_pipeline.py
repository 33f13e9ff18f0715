"""Pipeline stages as processes: each sends its results to the next one, over gloo or NCCL.

A tensor is transferred while its sender computes the next step. The sender keeps the last tensors, because gloo reads
them in place. The engine has at most one step per stage plus one in flight, so a tensor that was sent that many steps
ago has arrived, and waiting for it does not block.
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
        members: the ranks with the same index in each stage, from the first stage to the last.
        group: the process group of `members`.
    """

    def __init__(self, members: Sequence[int], rank: int, group: distributed.ProcessGroup) -> None:
        self.stage = Stage(members.index(rank), len(members))
        self._members, self._rank, self._group = members, rank, group
        self._on_their_way: deque[tuple[distributed.Work, torch.Tensor]] = deque()

    def send(self, x: torch.Tensor) -> None:
        """See `Pipeline`.

        Raises:
            RankLostError: the next stage has died, or does not respond in time.
        """
        x = x.contiguous()
        with waiting(self._rank, len(self._members), "send"):
            if len(self._on_their_way) > self.stage.count:
                self._on_their_way.popleft()[0].wait()
            work = distributed.isend(bytes_of(x), dst=self._members[self.stage.index + 1], group=self._group)
        assert work is not None
        self._on_their_way.append((work, x))

    def receive(self, x: torch.Tensor) -> None:
        """See `Pipeline`.

        Raises:
            RankLostError: the previous stage has died, or does not respond in time.
        """
        with waiting(self._rank, len(self._members), "receive"):
            work = distributed.irecv(bytes_of(x), src=self._members[self.stage.index - 1], group=self._group)
            assert work is not None
            work.wait()
