"""The seam between a checkpoint's files and the matrices that they hold in several tensors each."""

from __future__ import annotations

from typing import Protocol

import torch

from stoker_engine.architectures.stored_formats import GroupFormat

#: A part of a tensor: a slice for each dimension, both ends stated.
Part = tuple[slice, ...]


class Tensors(Protocol):
    """Tensors by name, as the files hold them."""

    def names(self) -> list[str]:
        """All of them."""
        ...

    def shape(self, name: str) -> torch.Size:
        """Of one."""
        ...

    def dtype(self, name: str) -> torch.dtype | None:
        """Of one; None: one that torch does not have."""
        ...

    def read(self, name: str, part: Part | None = None) -> torch.Tensor:
        """One, or a part of it, on the CPU; whatever its dtype is."""
        ...


class StoredModule(Protocol):
    """One quantized matrix of a checkpoint, or a stack of them.

    Attributes:
        shape: of the matrix that it stands for: [outputs, inner], or [count, outputs, inner].
        format: what it is brought into.
        tensors: the names of those that it consists of.
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
        """That part of the matrix: uint8 [..., rows, bytes of a row]. No more of the files is read than it needs.

        Raises:
            WeightsError: the tensors do not fit together, or hold what is no number.
        """
        ...

    def columns(self) -> torch.Tensor | None:
        """Where columns are in order of their groups: the matrix's column at each position of a row, int64 [inner]."""
        ...
