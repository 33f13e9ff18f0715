"""Joins a rank with the other ranks of its engine."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stoker_engine.parallel.communicator import Communicator, SingleRank
from stoker_engine.parallel.layout import RankLayout
from stoker_engine.parallel.process_pipeline import ProcessPipeline
from stoker_engine.parallel.rank_groups import RankGroups
from stoker_engine.parallel.shm_communicator import MAX_RANKS, SharedMemory, ShmCommunicator
from stoker_engine.parallel.torch_communicator import World


@dataclass(frozen=True)
class Joined:
    """A rank's connections to the other ranks.

    Attributes:
        groups: the communicators that the rank uses.
    """

    groups: RankGroups
    _world: World

    def settle(self) -> None:
        """Close the connections of torch.distributed if steps use only shared memory: gloo's thread would wake up a
        hundred times per second, even while the engine is idle. Must be called after all ranks have loaded."""
        if isinstance(self.groups.tensor, ShmCommunicator) and self.groups.pipeline.stage.count == 1:
            self.close()

    def close(self) -> None:
        """Close the connections to the other ranks."""
        self._world.close()


def join(
    rank: int, layout: RankLayout, rendezvous: str, timeout_s: float, shared: SharedMemory | None = None
) -> Joined:
    """Connect this rank to the other ranks of its engine, and wait until all have joined.

    Args:
        rank: this process's rank in the engine.
        rendezvous: URL of the rendezvous; see `World`.
        timeout_s: timeout of joining and of each operation, in seconds.
        shared: memory of the ranks that share layers with this one; None: they share no memory.

    Raises:
        RankLostError: not all ranks joined in time.
    """
    world = World(rank, layout.size, rendezvous, timeout_s)
    engine = world.ranks([list(range(layout.size))])
    tensor = _tensor_group(rank, layout, timeout_s, world, engine, shared)
    if layout.pipeline == 1:
        return Joined(RankGroups(tensor, engine=engine), world)
    members, group = world.group_of(layout.pipelines())
    return Joined(RankGroups(tensor, ProcessPipeline(members, rank, group), engine), world)


def _tensor_group(
    rank: int, layout: RankLayout, timeout_s: float, world: World, engine: Communicator, shared: SharedMemory | None
) -> Communicator:
    if layout.tensor == 1:
        return SingleRank()
    if shared is None or layout.tensor > MAX_RANKS:
        return world.ranks(layout.tensor_groups())
    library = shared.library
    # If a rank lacks the CPU kernels, all ranks communicate by torch.distributed.
    is_everywhere = bool(engine.all_gather(torch.tensor([library is not None])).all())
    if library is None or not is_everywhere:
        return world.ranks(layout.tensor_groups())
    return ShmCommunicator(layout.place_of(rank), layout.tensor, shared.fd, timeout_s, library, shared.spin_us)
