"""The placement of ranks on nodes.

All ranks of all engines, one engine after the other, are divided into equal parts, one for each node:

    2 engines of 2 ranks, 2 nodes      node 0: engine 0        node 1: engine 1
    1 engine of 2 stages × 2, 2 nodes   node 0: stage 0       node 1: stage 1
    1 engine of 1 stage × 4, 2 nodes    node 0: ranks 0, 1    node 1: ranks 2, 3 of the same layers

An engine's ranks are therefore on one node or on consecutive nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

from stoker_engine.contract.engine_args import EngineArgs


@dataclass(frozen=True)
class RankPlacement:
    """The numbers that determine the placement of ranks.

    Attributes:
        nodes: number of nodes; divides the number of all ranks.
        engines: number of engines of the model (data parallelism).
        size: number of ranks of an engine.
    """

    nodes: int = 1
    engines: int = 1
    size: int = 1

    @classmethod
    def of(cls, args: EngineArgs) -> RankPlacement:
        """Return the placement for `args`."""
        return cls(args.nnodes, args.data_parallel_size, args.tensor_parallel_size * args.pipeline_parallel_size)

    def node_of(self, engine: int, rank: int) -> int:
        """Return the node of an engine's rank."""
        return (engine * self.size + rank) // (self.engines * self.size // self.nodes)

    def nodes_of(self, engine: int) -> range:
        """Return the nodes with ranks of an engine."""
        return range(self.node_of(engine, 0), self.node_of(engine, self.size - 1) + 1)

    def engines_on(self, node: int) -> list[int]:
        """Return the engines with ranks on a node."""
        return [engine for engine in range(self.engines) if node in self.nodes_of(engine)]

    def ranks_on(self, node: int, engine: int) -> list[int]:
        """Return the ranks of an engine on a node."""
        return [rank for rank in range(self.size) if self.node_of(engine, rank) == node]

    def neighbours(self, engine: int, rank: int) -> tuple[int, int]:
        """Return the number of ranks of all engines on the node of this rank, and this rank's index among them."""
        on_node = self.engines * self.size // self.nodes
        return on_node, (engine * self.size + rank) % on_node
