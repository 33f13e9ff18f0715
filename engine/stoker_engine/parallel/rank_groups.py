"""The groups of ranks that a rank communicates with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

from stoker_engine.parallel.communicator import Communicator, SingleRank
from stoker_engine.sizing.pipeline_stages import Stage


class Pipeline(Protocol):
    """The ranks with the same index in the previous and the next stage.

    Attributes:
        stage: this rank's stage.
    """

    stage: Stage

    def send(self, x: torch.Tensor) -> None:
        """Send `x` to the next stage. May return before `x` has arrived, so it must not be modified afterwards."""
        ...

    def receive(self, x: torch.Tensor) -> None:
        """Receive the previous stage's next tensor, in the order of sending, into `x`, which is contiguous and has its
        shape and dtype."""
        ...


class OneStage:
    """The pipeline of ranks that have all layers."""

    stage = Stage()

    def send(self, x: torch.Tensor) -> None:
        """See `Pipeline`."""
        raise AssertionError("there is no other stage")

    def receive(self, x: torch.Tensor) -> None:
        """See `Pipeline`."""
        raise AssertionError("there is no other stage")


@dataclass(frozen=True)
class RankGroups:
    """The groups of one of the ranks that compute a model together.

    Attributes:
        tensor: ranks of this rank's stage, which share its layers.
        pipeline: the ranks with the same index in the previous and the next stage.
        engine: all ranks of the engine; must be used only while the model loads.
    """

    tensor: Communicator = field(default_factory=SingleRank)
    pipeline: Pipeline = field(default_factory=OneStage)
    engine: Communicator = field(default_factory=SingleRank)

    @property
    def samples(self) -> bool:
        """Whether this rank samples tokens."""
        return self.pipeline.stage.is_last and self.tensor.rank == 0
