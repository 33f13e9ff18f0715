"""Interface between layers and the storage formats of their matrices.

A layer requests a matrix by its size: outputs and inner dimension. A *method* allocates the matrix; the matrix provides
the targets that a loader fills, and creates its operations. `layers.build.Build.linear` chooses the method, so layers
do not depend on formats.

    rows      the outputs. Merged matrices (q, k, v) are stacked along the rows; a target covers one of them.
    columns   the inner dimension. Block formats can be cut only between blocks: `column_multiple`.
"""

from __future__ import annotations

from typing import Protocol

import torch

from stoker_engine.architectures.activation import Activation
from stoker_engine.kernels.bundle import Experts, Kernels, Operation
from stoker_engine.quant.weight_target import Shard, WeightTarget


class Products(Protocol):
    """This rank's shard of one matrix [outputs, inner], or of several of the same shape (such as experts)."""

    def weight_target(self, first: int, rows: Shard, columns: Shard, index: int | None = None) -> WeightTarget:
        """Return the target of a weight.

        Args:
            first: row of this matrix at which the weight starts.
            rows, columns: this rank's shards of the weight's dimensions; files hold [rows.full, columns.full].
            index: index of the matrix, if there are several; None if there is one.
        """
        ...

    def columns_target(self, first: int, index: int | None = None) -> WeightTarget | None:
        """Return the target of a weight's column order, int32 [inner]: the column at each position of a row. None if
        the format does not reorder columns. For the arguments see `weight_target`."""
        ...

    def linear(self, bias: torch.Tensor | None = None) -> Operation:
        """Return the linear operation [..., inner] → [..., outputs], see `kernels.linear`."""
        ...

    def linears(self, biases: torch.Tensor | None = None) -> list[Operation]:
        """Return one linear operation for each of several matrices; `biases`: [count, outputs]."""
        ...

    def experts(
        self,
        down: Products,
        act: Activation,
        biases: torch.Tensor | None = None,
        down_biases: torch.Tensor | None = None,
    ) -> Experts:
        """Return the operation of experts whose merged gate and up projections are these matrices, see
        `kernels.moe.experts`.

        Args:
            down: the experts' down projections.
            act: activation of the gate.
            biases, down_biases: [count, outputs], biases of these matrices and of `down`.
        """
        ...


class Matrix(Products, Protocol):
    """`Products` stored in a single format."""

    def stack_target(self, stack: Shard) -> WeightTarget:
        """Return the target of a weight [stack.full, outputs, inner] of which this rank keeps the matrices `stack`."""
        ...

    def batched_linear(self) -> Operation:
        """Return the operation [tokens, count, inner] → [tokens, count, outputs], see `kernels.batched_linear`."""
        ...

    def lookup(self, rows: torch.Tensor) -> torch.Tensor:
        """Look up rows by index: int64 [tokens] → [tokens, inner] in the model's dtype."""
        ...


class LinearMethod(Protocol):
    """A storage format of matrices.

    Methods compare equal if they store matrices in the same way.
    """

    @property
    def column_multiple(self) -> int:
        """Columns can be split between ranks only at multiples of this number."""
        ...

    @property
    def whole_columns(self) -> bool:
        """Whether columns may be reordered, so that they cannot be split between ranks."""
        ...

    def create(
        self, outputs: int, inner: int, dtype: torch.dtype, kernels: Kernels, count: int | None = None
    ) -> Matrix:
        """Allocate an uninitialized matrix [outputs, inner] on torch's default device.

        Args:
            dtype: the model's dtype.
            count: number of matrices, [count, outputs, inner]; None for a single one.
        """
        ...
