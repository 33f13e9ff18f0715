"""What a part gets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from gpu_parts.figures import Figure, Recorder
from gpu_parts.scale import Scale


@dataclass(frozen=True)
class Context:
    """What a part measures, and where its figures go.

    Attributes:
        folder: the models' folder; files in it are shared by all parts.
    """

    scale: Scale
    folder: Path
    recorder: Recorder

    @property
    def device(self) -> torch.device:
        """The device that is measured."""
        return torch.device(self.scale.device)

    def model(self, name: str) -> Path:
        """Return the folder of a model."""
        return self.folder / name

    def add(self, figure: Figure) -> None:
        """Record a figure."""
        self.recorder.add(figure)
