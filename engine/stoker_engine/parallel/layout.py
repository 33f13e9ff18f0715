"""The layout of an engine's ranks: pipeline stages and tensor parallelism.

rank = stage × tensor + index in the stage

          index 0   index 1
stage 0   rank 0    rank 1      the first layers, each split over two ranks
stage 1   rank 2    rank 3      the last layers; rank 2 samples
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
        tensor: number of ranks that share each layer.
        pipeline: number of pipeline stages.
        expert: whether each rank of a stage has whole experts (expert parallelism), instead of a shard of each.
    """

    tensor: int = 1
    pipeline: int = 1
    expert: bool = False

    @classmethod
    def of(cls, args: EngineArgs) -> RankLayout:
        """Return the layout requested by `args`."""
        return cls(args.tensor_parallel_size, args.pipeline_parallel_size, args.enable_expert_parallel)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.tensor * self.pipeline

    @property
    def sharding(self) -> Sharding:
        """The layout as the `Sharding` of the memory estimate."""
        return Sharding(self.tensor, self.pipeline, self.tensor if self.expert else 1)

    @property
    def first_of_last_stage(self) -> int:
        """The rank that samples and returns results."""
        return self.size - self.tensor

    def stage_of(self, rank: int) -> Stage:
        """Return the stage of a rank."""
        return Stage(rank // self.tensor, self.pipeline)

    def place_of(self, rank: int) -> int:
        """Return a rank's index within its stage."""
        return rank % self.tensor

    def tensor_groups(self) -> list[list[int]]:
        """Return the ranks of each stage, which share its layers."""
        return [list(range(first, first + self.tensor)) for first in range(0, self.size, self.tensor)]

    def pipelines(self) -> list[list[int]]:
        """Return for each index in a stage the ranks with this index, from the first stage to the last."""
        return [list(range(tensor_rank, self.size, self.tensor)) for tensor_rank in range(self.tensor)]

    def __str__(self) -> str:
        """Return text such as "tensor 2 × pipeline 2"."""
        experts = ", whole experts" if self.expert else ""
        return f"tensor {self.tensor} × pipeline {self.pipeline}{experts}"
