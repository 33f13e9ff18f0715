"""Matrices whose numbers are brought into another order once all of them are there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from stoker_engine.kernels.bundle import Kernels, Operation


@runtime_checkable
class Packable(Protocol):
    """A matrix that may be packed.

    Attributes:
        is_packed: it is in panels (`kernels.panels`).
    """

    is_packed: bool

    def pack(self) -> None:
        """Brings the numbers into the order in which they are multiplied fastest; once, when all of them are there."""
        ...


@runtime_checkable
class Resolvable(Protocol):
    """A linear operation with a matrix that may be packed later."""

    @property
    def now(self) -> Operation:
        """What computes it, as long as the matrix stays as it is."""
        ...


class LazyPrepack:
    """The linear operation with a matrix, before it is packed and after."""

    def __init__(self, matrix: Packable, of_rows: Operation, of_panels: Operation) -> None:
        self._matrix, self._of_rows, self._of_panels = matrix, of_rows, of_panels

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `Products.linear`."""
        return self._of_panels(x) if self._matrix.is_packed else self._of_rows(x)

    @property
    def now(self) -> Operation:
        """See `Resolvable`."""
        return self._of_panels if self._matrix.is_packed else self._of_rows


class LazyPrepackConcat:
    """Products with matrices of which each may be packed later; their results lie side by side."""

    def __init__(self, linears: Sequence[Operation], kernels: Kernels) -> None:
        self._linears, self._kernels = linears, kernels
        self._before = kernels.concat_linear(linears)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `Products.linear`."""
        return self._before(x)

    @property
    def now(self) -> Operation:
        """See `Resolvable`."""
        return self._kernels.concat_linear([resolve_prepack(linear) for linear in self._linears])


def resolve_prepack(linear: Operation) -> Operation:
    """A linear operation with matrices that are packed by now, or never will be."""
    return linear.now if isinstance(linear, Resolvable) else linear
