"""Which rank is on which node.

All ranks of all engines, one engine after the other, are dealt out in equal parts:

    2 engines of 2 ranks, 2 nodes      node 0: engine 0        node 1: engine 1
    1 engine of 2 stages × 2, 2 nodes   node 0: stage 0       node 1: stage 1
    1 engine of 1 stage × 4, 2 nodes    node 0: ranks 0, 1    node 1: ranks 2, 3 of the same layers

So an engine is whole on a node where engines are no larger than that, and else its stages follow each other over nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

from stoker_engine.contract.engine_args import EngineArgs


@dataclass(frozen=True)
class RankPlacement:
    """Where ranks are.

    Attributes:
        nodes: how many there are; they divide all ranks.
        engines: of the model.
        size: ranks of an engine.
    """

    nodes: int = 1
    engines: int = 1
    size: int = 1

    @classmethod
    def of(cls, args: EngineArgs) -> RankPlacement:
        """What `args` ask for."""
        return cls(args.nnodes, args.data_parallel_size, args.tensor_parallel_size * args.pipeline_parallel_size)

    def node_of(self, engine: int, rank: int) -> int:
        """The node that has an engine's rank."""
        return (engine * self.size + rank) // (self.engines * self.size // self.nodes)

    def nodes_of(self, engine: int) -> range:
        """The nodes that have ranks of an engine."""
        return range(self.node_of(engine, 0), self.node_of(engine, self.size - 1) + 1)

    def engines_on(self, node: int) -> list[int]:
        """The engines that have ranks on a node."""
        return [engine for engine in range(self.engines) if node in self.nodes_of(engine)]

    def ranks_on(self, node: int, engine: int) -> list[int]:
        """Those of an engine's ranks that a node has."""
        return [rank for rank in range(self.size) if self.node_of(engine, rank) == node]

    def neighbours(self, engine: int, rank: int) -> tuple[int, int]:
        """How many ranks, of all engines, the node of this rank has, and which of them it is."""
        on_node = self.engines * self.size // self.nodes
        return on_node, (engine * self.size + rank) % on_node
