"""How the ranks of one engine of a model share it.

rank = stage × tensor + place

          place 0   place 1
stage 0   rank 0    rank 1      the first layers, each split over two ranks
stage 1   rank 2    rank 3      the last ones; rank 2 samples
"""

from __future__ import annotations

from dataclasses import dataclass

from stoker_engine.contract.engine_args import EngineArgs
from stoker_engine.sizing.pipeline_stages import Stage
from stoker_engine.sizing.weight_sizes import Sharding


@dataclass(frozen=True)
class RankLayout:
    """The ranks of one engine.

    Attributes:
        tensor: ranks that share each layer.
        pipeline: stages that the layers are dealt among.
        expert: whether whole experts are dealt among the ranks of a stage, instead of each being split.
    """

    tensor: int = 1
    pipeline: int = 1
    expert: bool = False

    @classmethod
    def of(cls, args: EngineArgs) -> RankLayout:
        """What `args` ask for."""
        return cls(args.tensor_parallel_size, args.pipeline_parallel_size, args.enable_expert_parallel)

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.tensor * self.pipeline

    @property
    def sharding(self) -> Sharding:
        """The same, for the memory arithmetic."""
        return Sharding(self.tensor, self.pipeline, self.tensor if self.expert else 1)

    @property
    def first_of_last_stage(self) -> int:
        """The rank that samples, and answers."""
        return self.size - self.tensor

    def stage_of(self, rank: int) -> Stage:
        """The stage that a rank is in."""
        return Stage(rank // self.tensor, self.pipeline)

    def place_of(self, rank: int) -> int:
        """Which of its stage's ranks a rank is."""
        return rank % self.tensor

    def tensor_groups(self) -> list[list[int]]:
        """The ranks of each stage, which share its layers."""
        return [list(range(first, first + self.tensor)) for first in range(0, self.size, self.tensor)]

    def pipelines(self) -> list[list[int]]:
        """The ranks of each tensor rank, first stage to last, which hand on what they compute."""
        return [list(range(tensor_rank, self.size, self.tensor)) for tensor_rank in range(self.tensor)]

    def __str__(self) -> str:
        """ "tensor 2 × pipeline 2"."""
        experts = ", whole experts" if self.expert else ""
        return f"tensor {self.tensor} × pipeline {self.pipeline}{experts}"
