"""Unquantized matrices in the model's dtype."""

from __future__ import annotations

from typing import Final

import torch
from torch import nn

from stoker_engine.architectures.activation import Activation
from stoker_engine.kernels.batched_linear import by_head
from stoker_engine.kernels.bundle import Experts, Kernels, Operation
from stoker_engine.kernels.moe import experts, grouped_linear
from stoker_engine.quant.method import Products
from stoker_engine.quant.prepack import LazyPrepack
from stoker_engine.quant.weight_target import Shard, WeightTarget


class UnquantizedMatrix(nn.Module):
    """One or several unquantized matrices; see `Matrix`.

    Attributes:
        weight: [outputs, inner], or [count, outputs, inner].
        is_packed: whether all its matrices are in panels (`kernels.panels`).
    """

    def __init__(self, weight: torch.Tensor, kernels: Kernels) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.kernels = kernels
        self.is_packed = False
        matrix = weight[0] if weight.dim() == 3 and len(weight) else weight
        fit = kernels.panels is not None and matrix.dim() == 2 and kernels.panels.fit(matrix)
        self._panels = kernels.panels if fit else None

    def pack(self) -> None:
        """See `Packable`."""
        if self._panels is None or self.is_packed:
            return
        weight = self.weight.data
        for matrix in weight if weight.dim() == 3 else [weight]:
            self._panels.pack(matrix)
        self.is_packed = True

    def weight_target(self, first: int, rows: Shard, columns: Shard, index: int | None = None) -> WeightTarget:
        """See `Matrix`."""
        matrix = self.weight.data if index is None else self.weight.data[index]
        return WeightTarget.of(matrix[first : first + rows.size], rows, columns)

    def columns_target(self, first: int, index: int | None = None) -> WeightTarget | None:
        """See `Matrix`."""
        return None

    def stack_target(self, stack: Shard) -> WeightTarget:
        """See `Matrix`."""
        return WeightTarget.of(self.weight.data, stack, *map(Shard.whole, self.weight.shape[1:]))

    def linear(self, bias: torch.Tensor | None = None) -> Operation:
        """See `Matrix`."""
        return self._linear(self.weight.data, bias)

    def linears(self, biases: torch.Tensor | None = None) -> list[Operation]:
        """See `Matrix`."""
        return grouped_linear(self._linear, self.weight.data, biases)

    def batched_linear(self) -> Operation:
        """See `Matrix`."""
        if self._panels is None:
            return self.kernels.batched_linear(self.weight.data)
        return by_head(self.linears())

    def lookup(self, rows: torch.Tensor) -> torch.Tensor:
        """See `Matrix`."""
        if self._panels is not None and self.is_packed:
            return self._panels.rows(self.weight.data, rows)
        return nn.functional.embedding(rows, self.weight)

    def experts(
        self,
        down: Products,
        act: Activation,
        biases: torch.Tensor | None = None,
        down_biases: torch.Tensor | None = None,
    ) -> Experts:
        """See `Matrix`."""
        if isinstance(down, UnquantizedMatrix) and self._panels is None and down._panels is None:
            return self.kernels.experts(self.weight.data, down.weight.data, act, biases, down_biases)
        return experts(self.linears(biases), down.linears(down_biases), self.kernels.act_and_mul(act))

    def _linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Operation:
        """Return the linear operation with one matrix; it is valid before and after the matrix is packed."""
        of_rows = self.kernels.linear(weight, bias)
        return of_rows if self._panels is None else LazyPrepack(self, of_rows, self._panels.linear(weight, bias))


class Unquantized:
    """Storage in the model's dtype; see `LinearMethod`."""

    column_multiple = 1
    whole_columns = False

    def create(
        self, outputs: int, inner: int, dtype: torch.dtype, kernels: Kernels, count: int | None = None
    ) -> UnquantizedMatrix:
        """See `LinearMethod`."""
        shape = (outputs, inner) if count is None else (count, outputs, inner)
        return UnquantizedMatrix(torch.empty(shape, dtype=dtype), kernels)


UNQUANTIZED: Final = Unquantized()
