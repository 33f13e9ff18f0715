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


class PackedLater:
    """The product with a matrix, before it is packed and after."""

    def __init__(self, matrix: Packable, of_rows: Operation, of_panels: Operation) -> None:
        self._matrix, self._of_rows, self._of_panels = matrix, of_rows, of_panels

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `Products.product`."""
        return self._of_panels(x) if self._matrix.is_packed else self._of_rows(x)

    @property
    def now(self) -> Operation:
        """What computes it, as long as the matrix stays as it is."""
        return self._of_panels if self._matrix.is_packed else self._of_rows


class PackedSideBySide:
    """Products with matrices of which each may be packed later; their results lie side by side."""

    def __init__(self, products: Sequence[Operation], kernels: Kernels) -> None:
        self._products, self._kernels = products, kernels
        self._before = kernels.side_by_side(products)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `Products.product`."""
        return self._before(x)

    @property
    def now(self) -> Operation:
        """See `PackedLater.now`."""
        return self._kernels.side_by_side([as_it_stays(product) for product in self._products])


def as_it_stays(product: Operation) -> Operation:
    """A product with matrices that are packed by now, or never will be."""
    return product.now if isinstance(product, PackedLater | PackedSideBySide) else product
