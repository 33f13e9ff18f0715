"""A rank meets the others of its engine."""

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
    """A rank among the others.

    Attributes:
        groups: those it works with.
    """

    groups: RankGroups
    _world: World

    def settle(self) -> None:
        """All ranks have loaded. What steps do not need is given up: gloo's thread wakes up a hundred times a second,
        also while nobody asks for anything."""
        if isinstance(self.groups.tensor, ShmCommunicator) and self.groups.pipeline.stage.count == 1:
            self.close()

    def close(self) -> None:
        """Leaves the others."""
        self._world.close()


def join(
    rank: int, layout: RankLayout, rendezvous: str, timeout_s: float, shared: SharedMemory | None = None
) -> Joined:
    """Waits until all ranks of an engine have come.

    Args:
        rank: this one's number.
        layout: how all of them share the model.
        rendezvous: where they find each other; see `World`.
        timeout_s: how long a rank waits for another one.
        shared: where the ranks that share layers meet; None: they share no memory.

    Raises:
        RankLostError: not all came in time.
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
    # Of ranks of different builds, or short of memory, one may have no kernels: then none goes by them.
    is_everywhere = bool(engine.all_gather(torch.tensor([library is not None])).all())
    if library is None or not is_everywhere:
        return world.ranks(layout.tensor_groups())
    return ShmCommunicator(layout.place_of(rank), layout.tensor, shared.fd, timeout_s, library, shared.spin_us)
