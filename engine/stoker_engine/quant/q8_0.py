"""Matrices that stay blocks of GGUF's Q8_0: 8.5 bits a number, and the numbers that the file means.

They are computed with as if they had been dequantized to the model's dtype (`kernels.q8_0`); nothing but the memory
they take, and the time it takes to read it, is another.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import nn

from stoker_engine.kernels.bundle import Experts, Kernels, Operation
from stoker_engine.kernels.moe import experts
from stoker_engine.quant.method import Matrix
from stoker_engine.quant.slot import Share, Slot
from stoker_engine.sizing.block_weights import Q8_0


class Q8Matrix(nn.Module):
    """See `Matrix`.

    Attributes:
        blocks: uint8 [outputs, inner / 32 × 34], or [count, outputs, inner / 32 × 34].
    """

    def __init__(self, blocks: torch.Tensor, dtype: torch.dtype, kernels: Kernels) -> None:
        super().__init__()
        self.blocks = nn.Parameter(blocks, requires_grad=False)
        self.inner = blocks.shape[-1] // Q8_0.bytes * Q8_0.numbers
        self.dtype, self.kernels = dtype, kernels

    def slot(self, first: int, rows: Share, columns: Share, index: int | None = None) -> Slot:
        """See `Matrix`."""
        matrix = self.blocks.data if index is None else self.blocks.data[index]
        return Slot.of(matrix[first : first + rows.size], rows, columns, blocks=Q8_0)

    def stack_slot(self, stack: Share) -> Slot:
        """See `Matrix`."""
        shares = stack, Share.whole(self.blocks.shape[1]), Share.whole(self.inner)
        return Slot.of(self.blocks.data, *shares, blocks=Q8_0)

    def product(self, bias: torch.Tensor | None = None) -> Operation:
        """See `Matrix`."""
        return self.kernels.q8_0_product(self.blocks.data, self.dtype, bias)

    def products(self) -> list[Operation]:
        """See `Matrix`."""
        return [self.kernels.q8_0_product(each, self.dtype) for each in self.blocks.data]

    def batched_product(self) -> Operation:
        """See `Matrix`."""
        products = self.products()
        return lambda x: torch.stack([each(x[:, index]) for index, each in enumerate(products)], dim=1)

    def lookup(self, rows: torch.Tensor) -> torch.Tensor:
        """See `Matrix`."""
        return self.kernels.q8_0_rows(self.blocks.data, rows, self.dtype)

    def experts(self, down: Matrix, act: str) -> Experts:
        """See `Matrix`."""
        return experts(self.products(), down.products(), self.kernels.act_and_mul(act))


class Q8Blocks:
    """See `LinearMethod`."""

    column_multiple = Q8_0.numbers

    def create(
        self, outputs: int, inner: int, dtype: torch.dtype, kernels: Kernels, count: int | None = None
    ) -> Q8Matrix:
        """See `LinearMethod`."""
        width = Q8_0.stored_bytes(inner)
        shape = (outputs, width) if count is None else (count, outputs, width)
        return Q8Matrix(torch.empty(shape, dtype=torch.uint8), dtype, kernels)


Q8_BLOCKS: Final = Q8Blocks()
