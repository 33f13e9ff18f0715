"""Which rank is on which node.

All ranks of all copies, one copy after the other, are dealt out in equal parts:

    2 copies of 2 ranks, 2 nodes      node 0: copy 0        node 1: copy 1
    1 copy of 2 stages × 2, 2 nodes   node 0: stage 0       node 1: stage 1
    1 copy of 1 stage × 4, 2 nodes    node 0: ranks 0, 1    node 1: ranks 2, 3 of the same layers

So a copy is whole on a node where copies are no larger than that, and else its stages follow each other over nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

from stoker_engine.contract.engine_args import EngineArgs


@dataclass(frozen=True)
class Placement:
    """Where ranks are.

    Attributes:
        nodes: how many there are; they divide all ranks.
        copies: of the model.
        size: ranks of a copy.
    """

    nodes: int = 1
    copies: int = 1
    size: int = 1

    @classmethod
    def of(cls, args: EngineArgs) -> Placement:
        """What `args` ask for."""
        return cls(args.nnodes, args.data_parallel_size, args.tensor_parallel_size * args.pipeline_parallel_size)

    def node_of(self, copy: int, rank: int) -> int:
        """The node that has a copy's rank."""
        return (copy * self.size + rank) // (self.copies * self.size // self.nodes)

    def nodes_of(self, copy: int) -> range:
        """The nodes that have ranks of a copy."""
        return range(self.node_of(copy, 0), self.node_of(copy, self.size - 1) + 1)

    def copies_on(self, node: int) -> list[int]:
        """The copies that have ranks on a node."""
        return [copy for copy in range(self.copies) if node in self.nodes_of(copy)]

    def ranks_on(self, node: int, copy: int) -> list[int]:
        """Those of a copy's ranks that a node has."""
        return [rank for rank in range(self.size) if self.node_of(copy, rank) == node]

    def neighbours(self, copy: int, rank: int) -> tuple[int, int]:
        """How many ranks of all copies the node of a copy's rank has, and which of them it is."""
        on_node = self.copies * self.size // self.nodes
        return on_node, (copy * self.size + rank) % on_node
