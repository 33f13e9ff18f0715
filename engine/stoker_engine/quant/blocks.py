"""Matrices stored in blocks (`architectures.stored_formats`).

Operations compute with the matrix dequantized to the model's dtype, while its storage takes less memory and bandwidth.
On a CPU's panels they also round activations to 8 bits (`kernels.int8_activations`). On a GPU they may quantize them to
the type of the codes (`kernels.w8a8_panels`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from stoker_engine.architectures.activation import Activation
from stoker_engine.architectures.stored_formats import StoredFormat
from stoker_engine.kernels.batched_linear import by_head
from stoker_engine.kernels.bundle import BlockStack, Experts, Kernels, Operation, RowFormat
from stoker_engine.kernels.moe import experts
from stoker_engine.kernels.w8a8_panels import row_format
from stoker_engine.quant.method import Products
from stoker_engine.quant.prepack import LazyPrepack, LazyPrepackExperts
from stoker_engine.quant.weight_target import Shard, WeightTarget


class BlockMatrix(nn.Module):
    """One or several matrices in blocks; see `Matrix`.

    Attributes:
        blocks: uint8 [outputs, bytes of a row], or [count, outputs, bytes of a row].
        columns: int32 [inner] or [count, inner], the column at each position of a row, for formats that store columns
            in the order of their groups; else None.
        is_packed: whether the matrix, or each of them, is packed (`kernels.bundle.BlockPanels`).
    """

    def __init__(
        self, blocks: torch.Tensor, stored: StoredFormat, inner: int, dtype: torch.dtype, kernels: Kernels
    ) -> None:
        super().__init__()
        self.blocks = nn.Parameter(blocks, requires_grad=False)
        self.stored, self.inner, self.dtype, self.kernels = stored, inner, dtype, kernels
        self.columns: nn.Parameter | None = None
        if stored.order_bytes(inner):
            order = torch.empty((*blocks.shape[:-2], inner), dtype=torch.int32)
            self.columns = nn.Parameter(order, requires_grad=False)
        self.is_packed = False
        panels = kernels.block_panels
        fit = None if panels is None else panels.fit if blocks.dim() == 2 else panels.fit_stack
        self._panels = panels if fit is not None and fit(blocks, stored, inner, dtype) else None

    @property
    def rounds_activations(self) -> bool:
        """Whether multiplications round activations to 8 bits."""
        return self._panels is not None and self.is_packed and self._panels.rounds_activations

    @property
    def row_format(self) -> RowFormat | None:
        """Format to which multiplications quantize activations; None if they do not. Read it after `pack`."""
        format = row_format(self.stored, self.inner)
        return format if self.is_packed and format in self.kernels.quantizing else None

    def pack(self) -> None:
        """See `Packable`."""
        if self._panels is not None and not self.is_packed:
            self._panels.pack(self.blocks.data, self.stored, self.inner)
            self.is_packed = True

    def weight_target(self, first: int, rows: Shard, columns: Shard, index: int | None = None) -> WeightTarget:
        """See `Matrix`."""
        matrix = self.blocks.data if index is None else self.blocks.data[index]
        return WeightTarget.of(matrix[first : first + rows.size], rows, columns, stored=self.stored)

    def columns_target(self, first: int, index: int | None = None) -> WeightTarget | None:
        """See `Matrix`."""
        if self.columns is None:
            return None
        return WeightTarget.whole(self.columns.data if index is None else self.columns.data[index])

    def stack_target(self, stack: Shard) -> WeightTarget:
        """See `Matrix`."""
        shares = stack, Shard.whole(self.blocks.shape[1]), Shard.whole(self.inner)
        return WeightTarget.of(self.blocks.data, *shares, stored=self.stored)

    def linear(self, bias: torch.Tensor | None = None) -> Operation:
        """See `Matrix`."""
        return self._linear(self.blocks.data, None if self.columns is None else self.columns.data, bias)

    def linears(self, biases: torch.Tensor | None = None) -> list[Operation]:
        """See `Matrix`."""
        none = [None] * len(self.blocks)
        columns = none if self.columns is None else self.columns.data
        each = zip(self.blocks.data, columns, none if biases is None else biases, strict=True)
        return [self._linear(blocks, order, bias) for blocks, order, bias in each]

    def batched_linear(self) -> Operation:
        """See `Matrix`."""
        return by_head(self.linears())

    def lookup(self, rows: torch.Tensor) -> torch.Tensor:
        """See `Matrix`."""
        look_up = self._panels.rows if self._panels is not None and self.is_packed else self.kernels.block_rows
        found = look_up(self.blocks.data, self.stored, self.inner, rows, self.dtype)
        if self.columns is None:
            return found
        return torch.empty_like(found).index_copy_(1, self.columns.data.long(), found)

    def experts(
        self,
        down: Products,
        act: Activation,
        biases: torch.Tensor | None = None,
        down_biases: torch.Tensor | None = None,
    ) -> Experts:
        """See `Matrix`."""
        if isinstance(down, BlockMatrix) and self.columns is None and down.columns is None:
            others = down

            def make() -> Experts:
                stacks = self._stack(biases), others._stack(down_biases)
                return self.kernels.block_experts(*stacks, act, self.dtype)

            matrices = [each for each in (self, others) if each._panels is not None]
            return LazyPrepackExperts(matrices, make) if matrices else make()
        return experts(self.linears(biases), down.linears(down_biases), self.kernels.act_and_mul(act))

    def _stack(self, biases: torch.Tensor | None) -> BlockStack:
        return BlockStack(self.blocks.data, self.stored, self.inner, biases, self.is_packed, self.row_format)

    def _linear(
        self, blocks: torch.Tensor, columns: torch.Tensor | None, bias: torch.Tensor | None = None
    ) -> Operation:
        matrix = blocks, self.stored, self.inner, self.dtype, bias
        linear = self.kernels.quant_linear(*matrix)
        if self._panels is not None:
            linear = LazyPrepack(self, linear, self._panels.linear(*matrix))
        if columns is None:
            return linear
        return lambda x: linear(x.index_select(-1, columns))


@dataclass(frozen=True)
class Blocks:
    """Storage in blocks of the format `stored`; see `LinearMethod`."""

    stored: StoredFormat

    @property
    def column_multiple(self) -> int:
        """See `LinearMethod`."""
        return self.stored.column_multiple

    @property
    def whole_columns(self) -> bool:
        """See `LinearMethod`."""
        return bool(self.stored.order_bytes(1))

    def create(
        self, outputs: int, inner: int, dtype: torch.dtype, kernels: Kernels, count: int | None = None
    ) -> BlockMatrix:
        """See `LinearMethod`."""
        width = self.stored.row_bytes(inner)
        shape = (outputs, width) if count is None else (count, outputs, width)
        return BlockMatrix(torch.empty(shape, dtype=torch.uint8), self.stored, inner, dtype, kernels)
