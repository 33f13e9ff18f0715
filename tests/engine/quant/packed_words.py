"""GPTQ's and AWQ's tensors, packed bit by bit from their values."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

#: Index of the value at each position of one of AWQ's words of eight.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack int64 [rows, values] → int32 [rows, words]: one long row of bits, the lowest bit of each value first."""
    stream = (codes.numpy()[..., None] >> np.arange(bits) & 1).reshape(len(codes), -1)
    octets = np.packbits(np.pad(stream, ((0, 0), (0, -stream.shape[1] % 32))), axis=1, bitorder="little")
    return torch.from_numpy(octets.view("<i4").copy())


@dataclass
class Quantized:
    """Random codes, scales and zero points of a matrix.

    Attributes:
        group: columns per group; -1: one group per row.
        act_order: whether columns are assigned to groups in random order.
    """

    outputs: int
    inner: int
    bits: int = 4
    group: int = 16
    symmetric: bool = False
    act_order: bool = False
    scale_dtype: torch.dtype = torch.float16
    seed: int = 0

    def __post_init__(self) -> None:
        random = torch.Generator().manual_seed(self.seed)
        size = self.group if self.group > 0 else self.inner
        groups, largest = -(-self.inner // size), 1 << self.bits
        self.g_idx = torch.arange(self.inner) // size
        if self.act_order:
            self.g_idx = self.g_idx[torch.randperm(self.inner, generator=random)]
        self.codes = torch.randint(0, largest, (self.outputs, self.inner), generator=random)
        self.zeros = torch.randint(0, largest, (self.outputs, groups), generator=random)
        if self.symmetric:
            self.zeros = torch.full_like(self.zeros, largest // 2)
        scales = (torch.rand(self.outputs, groups, generator=random) + 0.1) * 0.3 / largest
        self.scales = scales.to(self.scale_dtype)

    @property
    def weight(self) -> torch.Tensor:
        """Return the values, float32 [outputs, inner]."""
        return self.scales.float()[:, self.g_idx] * (self.codes - self.zeros[:, self.g_idx]).float()

    def gptq(self, name: str, less_one: bool = True) -> dict[str, torch.Tensor]:
        """Store as GPTQ's first version, or with unchanged zero points as the second."""
        zeros = (self.zeros - int(less_one)) % (1 << self.bits)
        return {
            f"{name}.qweight": pack(self.codes, self.bits).t().contiguous(),
            f"{name}.scales": self.scales.t().contiguous(),
            f"{name}.qzeros": pack(zeros.t(), self.bits),
            f"{name}.g_idx": self.g_idx.int(),
        }

    def awq(self, name: str) -> dict[str, torch.Tensor]:
        """Store as AutoAWQ's version ``gemm``."""

        def words(codes: torch.Tensor) -> torch.Tensor:
            return pack(codes.t().unflatten(-1, (-1, 8))[..., list(_AWQ_ORDER)].flatten(-2), 4)

        return {
            f"{name}.qweight": words(self.codes),
            f"{name}.scales": self.scales.t().contiguous(),
            f"{name}.qzeros": words(self.zeros),
        }
