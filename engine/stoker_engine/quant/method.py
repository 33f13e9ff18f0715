"""The seam between layers and how their matrices are stored.

A layer says which matrix it needs, in numbers: so many outputs, so large an inner dimension. A *method* makes what it
is stored in, gives the targets that a loader fills, and computes with it. A new format is a new file here, and a line
where the loader chooses (`layers.build.Build.linear`): no layer and no family changes.

    rows      the outputs. Merged matrices (q, k, v) lie below each other; a target is some rows of one.
    columns   the inner dimension. Formats of blocks can be cut only between blocks: `column_multiple`.
"""

from __future__ import annotations

from typing import Protocol

import torch

from stoker_engine.architectures.activation import Activation
from stoker_engine.kernels.bundle import Experts, Kernels, Operation
from stoker_engine.quant.weight_target import Shard, WeightTarget


class Products(Protocol):
    """This rank's share of one matrix [outputs, inner], or of several of the same shape (experts)."""

    def weight_target(self, first: int, rows: Shard, columns: Shard, index: int | None = None) -> WeightTarget:
        """Where a weight goes.

        Args:
            first: of this matrix's rows, the one where the weight begins.
            rows, columns: what is kept of the weight, [rows.full, columns.full] in files.
            index: which of several matrices.
        """
        ...

    def columns_target(self, first: int, index: int | None = None) -> WeightTarget | None:
        """Where the order of a weight's columns goes, if it is stored in one of its own: int32 [inner], the column at
        each position. The arguments are those of `weight_target`."""
        ...

    def linear(self, bias: torch.Tensor | None = None) -> Operation:
        """[..., inner] → [..., outputs], see `kernels.linear`."""
        ...

    def linears(self, biases: torch.Tensor | None = None) -> list[Operation]:
        """The linear operation with each of several; `biases`: [count, outputs]."""
        ...

    def experts(
        self,
        down: Products,
        act: Activation,
        biases: torch.Tensor | None = None,
        down_biases: torch.Tensor | None = None,
    ) -> Experts:
        """The experts whose gates and up projections these are, see `kernels.moe.experts`.

        Args:
            down: their down projections.
            act: the gate's activation.
            biases, down_biases: [count, outputs] of these, and of those.
        """
        ...


class Matrix(Products, Protocol):
    """The same, stored in one way throughout."""

    def stack_target(self, stack: Shard) -> WeightTarget:
        """Where a weight [stack.full, outputs, inner] goes that holds several matrices, these `stack` among them.

        Raises:
            ModelError: the format has no place that would take them all at once.
        """
        ...

    def batched_linear(self) -> Operation:
        """[tokens, count, inner] → [tokens, count, outputs]: each of several with its own, `kernels.batched_linear`."""
        ...

    def lookup(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows by number: [tokens] int64 → [tokens, inner] in the model's dtype."""
        ...


class LinearMethod(Protocol):
    """A way to store matrices.

    Two of them are equal where they store alike.
    """

    @property
    def column_multiple(self) -> int:
        """Columns are cut between ranks only at multiples of it."""
        ...

    @property
    def whole_columns(self) -> bool:
        """Whether columns are in an order of their own, and cannot be cut at all."""
        ...

    def create(
        self, outputs: int, inner: int, dtype: torch.dtype, kernels: Kernels, count: int | None = None
    ) -> Matrix:
        """What a matrix [outputs, inner] is stored in, on torch's default device; nothing is in it yet.

        Args:
            dtype: of activations.
            count: so many of them, [count, outputs, inner]; None: one.
        """
        ...
