"""Linear operation with a weight matrix."""

from __future__ import annotations

import torch
from torch.nn import functional


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x Wᵀ + b: [..., inner] → [..., outputs], for `weight` [outputs, inner] and `bias` [outputs] in x's dtype.

    Accumulates in float32, and rounds once. The CPU kernels are batch-invariant: a row's result is bit-identical in
    every batch. The bits of torch's GEMMs depend on the number of rows.
    """
    return functional.linear(x, weight, bias)
