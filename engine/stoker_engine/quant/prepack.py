"""Lazy prepacking: a matrix is reordered for its kernels after it is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch

from stoker_engine.kernels.bundle import Experts, Kernels, Operation


@runtime_checkable
class Packable(Protocol):
    """A matrix that can be packed.

    Attributes:
        is_packed: whether it is packed (`kernels.bundle.Panels`, `BlockPanels`).
    """

    is_packed: bool

    def pack(self) -> None:
        """Reorder the elements, if the kernels have a packed layout for the matrix; otherwise do nothing. Must not be
        called before the matrix is loaded; repeated calls have no effect."""
        ...


@runtime_checkable
class Resolvable(Protocol):
    """A linear operation whose matrix may be packed later."""

    @property
    def now(self) -> Operation:
        """The operation for the current layout of the matrix; valid until the matrix is packed."""
        ...


class LazyPrepack:
    """A linear operation that computes with the current layout of its matrix: rows, or the packed one."""

    def __init__(self, matrix: Packable, of_rows: Operation, of_packed: Operation) -> None:
        self._matrix, self._of_rows, self._of_packed = matrix, of_rows, of_packed

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `Products.linear`."""
        return self._of_packed(x) if self._matrix.is_packed else self._of_rows(x)

    @property
    def now(self) -> Operation:
        """See `Resolvable`."""
        return self._of_packed if self._matrix.is_packed else self._of_rows


class LazyPrepackExperts:
    """Experts that compute with the current layout of their matrices.

    Args:
        matrices: the matrices that may be packed later, all of them between the same two calls.
        make: returns the operation for the current layout.
    """

    def __init__(self, matrices: Sequence[Packable], make: Callable[[], Experts]) -> None:
        self._matrices, self._make, self._of_blocks = matrices, make, make()
        self._of_packed: Experts | None = None

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """See `Products.experts`."""
        if self._of_packed is not None:
            return self._of_packed(x, weights, chosen)
        if not all(matrix.is_packed for matrix in self._matrices):
            return self._of_blocks(x, weights, chosen)
        self._of_packed = self._make()
        return self._of_packed(x, weights, chosen)


class LazyPrepackConcat:
    """Concatenated outputs of linear operations, each of whose matrices may be packed later."""

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
    """Return the operation for the current layout of `linear`'s matrices, without a check for packing at each call;
    `linear` itself if its matrices are never packed. The matrices must not be packed afterwards."""
    return linear.now if isinstance(linear, Resolvable) else linear
