"""A rank meets the others of its copy."""

from __future__ import annotations

from dataclasses import dataclass

from stoker_engine.parallel.groups import Groups
from stoker_engine.parallel.layout import Layout
from stoker_engine.parallel.process_ranks import World
from stoker_engine.parallel.ranks import Alone


@dataclass(frozen=True)
class Joined:
    """A rank among the others.

    Attributes:
        groups: those it works with.
    """

    groups: Groups
    _world: World

    def close(self) -> None:
        """Leaves the others."""
        self._world.close()


def join(rank: int, layout: Layout, rendezvous: str, timeout_s: float) -> Joined:
    """Waits until all ranks of a copy have come.

    Args:
        rank: this one's number.
        layout: how all of them share the model.
        rendezvous: where they find each other; see `World`.
        timeout_s: how long a rank waits for another one.

    Raises:
        RankLostError: not all came in time.
    """
    world = World(rank, layout.size, rendezvous, timeout_s)
    copy = world.ranks([list(range(layout.size))])
    tensor = Alone() if layout.tensor == 1 else world.ranks(layout.tensor_groups())
    return Joined(Groups(tensor, copy=copy), world)
