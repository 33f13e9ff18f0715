"""Interface to a checkpoint's tensors, which are read on request."""

from __future__ import annotations

from typing import Protocol

import torch

from stoker_common.errors import WeightsError
from stoker_engine.architectures.stored_formats import StoredFormat
from stoker_engine.quant.checkpoints.module import Part as Part
from stoker_engine.quant.weight_target import WeightTarget


class WeightSource(Protocol):
    """Reads tensors one at a time, so that loading needs little memory beyond the model itself."""

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        ...

    def shape(self, name: str) -> torch.Size:
        """Return the shape of a tensor."""
        ...

    def stored(self, name: str) -> StoredFormat | None:
        """Return the block format in which `read` returns a tensor without quantizing it; None if there is none."""
        ...

    def read(self, name: str, part: Part | None = None, stored: StoredFormat | None = None) -> torch.Tensor:
        """Return a tensor, or a part of it, on the CPU, unless the source quantizes it on another device.

        Args:
            part: slices of the tensor; None: all of it.
            stored: block format of the result, uint8 rows; `part` must be cut between blocks. None: return values.
        """
        ...

    def read_into(self, name: str, target: WeightTarget) -> None:
        """Fill `target` with its shard of a tensor: with blocks if the target is stored in blocks, otherwise with
        values converted to the target's dtype.

        Raises:
            WeightsError: the whole tensor has the wrong shape.
        """
        ...


def check_shape(name: str, shape: torch.Size, target: WeightTarget) -> None:
    """Check the shape of the tensor `name` of the files against `target`.

    Raises:
        WeightsError: the shape is wrong.
    """
    if target.full_shape != shape:
        raise WeightsError(f"{name} has shape {tuple(shape)}, but the model needs {tuple(target.full_shape)}")
