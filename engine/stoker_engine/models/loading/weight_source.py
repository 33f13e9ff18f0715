"""Where weights come from: tensors by name, of which only what is asked for is read."""

from __future__ import annotations

from typing import Protocol

import torch

from stoker_common.errors import WeightsError
from stoker_engine.architectures.stored_formats import StoredFormat
from stoker_engine.quant.checkpoints.module import Part as Part
from stoker_engine.quant.weight_target import WeightTarget


class WeightSource(Protocol):
    """Tensors one at a time, so that a model larger than memory to spare still loads."""

    def names(self) -> list[str]:
        """All tensor names in the files."""
        ...

    def shape(self, name: str) -> torch.Size:
        """The shape of one tensor."""
        ...

    def stored(self, name: str) -> StoredFormat | None:
        """The format of blocks in which one tensor can be had; None: it is numbers."""
        ...

    def read(self, name: str, part: Part | None = None, stored: StoredFormat | None = None) -> torch.Tensor:
        """One tensor, or that part of it, on the CPU.

        Args:
            stored: the format that it can be had in: uint8, rows of blocks, cut between blocks; None: its numbers.
        """
        ...

    def read_into(self, name: str, target: WeightTarget) -> None:
        """Fills `target` with its part of one tensor, converted to its dtype.

        Raises:
            WeightsError: the whole tensor has another shape.
        """
        ...


def check_shape(name: str, shape: torch.Size, target: WeightTarget) -> None:
    """Whether the tensor called `name` in the files is the one that `target` has a place for.

    Raises:
        WeightsError: its shape is another.
    """
    if target.full_shape != shape:
        raise WeightsError(f"{name} has shape {tuple(shape)}, the model needs {tuple(target.full_shape)}")


def some(names: list[str]) -> str:
    """The first of these names, for a message."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
