"""Where weights come from: tensors by name, of which only what is asked for is read."""

from __future__ import annotations

from typing import Protocol

import torch

from stoker_engine.contract.errors import WeightsError
from stoker_engine.quant.slot import Slot
from stoker_engine.sizing.block_weights import BlockFormat

#: A part of a tensor: a slice for each dimension, both ends stated.
Part = tuple[slice, ...]


class WeightSource(Protocol):
    """Tensors one at a time, so that a model larger than memory to spare still loads."""

    def names(self) -> list[str]:
        """All tensor names in the files."""
        ...

    def shape(self, name: str) -> torch.Size:
        """The shape of one tensor."""
        ...

    def blocks(self, name: str) -> BlockFormat | None:
        """The format of blocks that one tensor is stored in, if it is one that models compute with."""
        ...

    def read(self, name: str, part: Part | None = None, blocks: BlockFormat | None = None) -> torch.Tensor:
        """One tensor, or that part of it, on the CPU.

        Args:
            blocks: the format that it is stored in: uint8, as it is, cut between blocks; None: its numbers.
        """
        ...

    def read_into(self, name: str, slot: Slot) -> None:
        """Fills `slot` with its part of one tensor, converted to its dtype.

        Raises:
            WeightsError: the whole tensor has another shape.
        """
        ...


def check_shape(name: str, shape: torch.Size, slot: Slot) -> None:
    """Whether the tensor called `name` in the files is the one that `slot` has a place for.

    Raises:
        WeightsError: its shape is another.
    """
    if slot.full_shape != shape:
        raise WeightsError(f"{name} has shape {tuple(shape)}, the model needs {tuple(slot.full_shape)}")
