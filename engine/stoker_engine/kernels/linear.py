"""Products with a weight matrix."""

from __future__ import annotations

import torch
from torch.nn import functional


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x Wᵀ + b: [..., inner] → [..., outputs], for `weight` [outputs, inner] and `bias` [outputs] in x's dtype.

    Sums in float32, and rounds once. With the CPU's kernels a row's result is the same in every batch, bit for bit;
    torch's own GEMMs differ with the number of rows.
    """
    return functional.linear(x, weight, bias)
