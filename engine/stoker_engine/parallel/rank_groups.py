"""Whom a rank works with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

from stoker_engine.parallel.communicator import Communicator, SingleRank
from stoker_engine.sizing.pipeline_stages import Stage


class Pipeline(Protocol):
    """The ranks of the same place in the stages before and after.

    Attributes:
        stage: this rank's.
    """

    stage: Stage

    def send(self, x: torch.Tensor) -> None:
        """Sends `x` to the next stage; returns before it has arrived, and `x` must not be written to afterwards."""
        ...

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """What the stage before sent; tensors come in the order in which they were sent."""
        ...


class OneStage:
    """One rank, or several, that have all layers."""

    stage = Stage()

    def send(self, x: torch.Tensor) -> None:
        """See `Pipeline`."""
        raise AssertionError("there is no other stage")

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """See `Pipeline`."""
        raise AssertionError("there is no other stage")


@dataclass(frozen=True)
class RankGroups:
    """The ranks that compute a model together, as one of them sees them.

    Attributes:
        tensor: those that share its layers.
        pipeline: those that have the layers before and after.
        engine: all of them; only while the model loads.
    """

    tensor: Communicator = field(default_factory=SingleRank)
    pipeline: Pipeline = field(default_factory=OneStage)
    engine: Communicator = field(default_factory=SingleRank)

    @property
    def samples(self) -> bool:
        """Whether this rank chooses the tokens."""
        return self.pipeline.stage.is_last and self.tensor.rank == 0
