"""Merged matrices (such as q, k, v): consecutive parts of the same format are stored as one matrix."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import nn

from stoker_engine.architectures.activation import Activation
from stoker_engine.kernels.bundle import Experts, Kernels, Operation
from stoker_engine.kernels.moe import experts
from stoker_engine.quant.method import LinearMethod, Matrix, Products
from stoker_engine.quant.prepack import LazyPrepackConcat
from stoker_engine.quant.weight_target import Shard, WeightTarget


def merged(
    parts: Sequence[tuple[LinearMethod, int]],
    inner: int,
    dtype: torch.dtype,
    kernels: Kernels,
    count: int | None = None,
) -> Products:
    """Allocate matrices that are multiplied with the same x.

    Args:
        parts: method and number of outputs of each matrix.
        inner, dtype, kernels, count: see `LinearMethod.create`.
    """
    # Each matrix with reordered columns has its own column order, so it is never merged with another.
    runs = groupby(enumerate(parts), lambda part: (part[1][0], part[0] if part[1][0].whole_columns else None))
    sizes = [(method, sum(size for _, (_, size) in run)) for (method, _), run in runs]
    matrices = [method.create(size, inner, dtype, kernels, count) for method, size in sizes]
    return matrices[0] if len(matrices) == 1 else Segments(matrices, [size for _, size in sizes], kernels)


class Segments(nn.Module):
    """Matrices (or stacks of them) whose outputs are concatenated; see `Products`."""

    def __init__(self, matrices: Sequence[Matrix], sizes: Sequence[int], kernels: Kernels) -> None:
        super().__init__()
        self.matrices, self._sizes, self._kernels = list(matrices), list(sizes), kernels
        for index, matrix in enumerate(matrices):
            if isinstance(matrix, nn.Module):
                self.add_module(str(index), matrix)

    def weight_target(self, first: int, rows: Shard, columns: Shard, index: int | None = None) -> WeightTarget:
        """See `Products`."""
        matrix, start = self._at(first)
        return matrix.weight_target(first - start, rows, columns, index)

    def columns_target(self, first: int, index: int | None = None) -> WeightTarget | None:
        """See `Products`."""
        matrix, start = self._at(first)
        return matrix.columns_target(first - start, index)

    def linear(self, bias: torch.Tensor | None = None) -> Operation:
        """See `Products`."""
        biases = [None] * len(self._sizes) if bias is None else bias.split(self._sizes)
        linears = [matrix.linear(each) for matrix, each in zip(self.matrices, biases, strict=True)]
        return LazyPrepackConcat(linears, self._kernels)

    def linears(self, biases: torch.Tensor | None = None) -> list[Operation]:
        """See `Products`."""
        parts = [None] * len(self._sizes) if biases is None else biases.split(self._sizes, dim=1)
        each = [matrix.linears(part) for matrix, part in zip(self.matrices, parts, strict=True)]
        return [self._kernels.concat_linear(linears) for linears in zip(*each, strict=True)]

    def experts(
        self,
        down: Products,
        act: Activation,
        biases: torch.Tensor | None = None,
        down_biases: torch.Tensor | None = None,
    ) -> Experts:
        """See `Products`."""
        return experts(self.linears(biases), down.linears(down_biases), self._kernels.act_and_mul(act))

    def _at(self, row: int) -> tuple[Matrix, int]:
        """Return the segment that contains `row`, and the row at which it starts."""
        start = 0
        for matrix, size in zip(self.matrices, self._sizes, strict=True):
            if row < start + size:
                return matrix, start
            start += size
        raise IndexError(row)
