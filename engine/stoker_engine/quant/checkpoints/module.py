"""Interface between a checkpoint's files and its quantized matrices, each of which consists of several tensors."""

from __future__ import annotations

from typing import Protocol

import torch

from stoker_engine.architectures.stored_formats import GroupFormat

#: A part of a tensor: a slice for each dimension, with explicit start and stop.
Part = tuple[slice, ...]


class Tensors(Protocol):
    """Tensors of the files, by name."""

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        ...

    def shape(self, name: str) -> torch.Size:
        """Return the shape of a tensor."""
        ...

    def dtype(self, name: str) -> torch.dtype | None:
        """Return the dtype of a tensor; None if torch does not have it."""
        ...

    def read(self, name: str, part: Part | None = None) -> torch.Tensor:
        """Read a tensor, or a part of it, to the CPU, in its stored dtype."""
        ...


class StoredModule(Protocol):
    """One quantized matrix of a checkpoint, or a stack of matrices.

    Attributes:
        shape: shape of the dequantized matrix, [outputs, inner] or [count, outputs, inner].
        format: format that `rows` converts it to.
        tensors: names of its tensors.
    """

    @property
    def shape(self) -> torch.Size:
        """See the class."""
        ...

    @property
    def format(self) -> GroupFormat:
        """See the class."""
        ...

    @property
    def tensors(self) -> frozenset[str]:
        """See the class."""
        ...

    def rows(self, part: Part) -> torch.Tensor:
        """Return a part of the matrix, uint8 [..., rows, bytes of a row], reading only what it needs from the files.

        Raises:
            WeightsError: the tensors are inconsistent, or contain NaN or infinity.
        """
        ...

    def columns(self) -> torch.Tensor | None:
        """Return int64 [inner], the matrix's column at each position of a row; None if columns are not reordered."""
        ...
