"""Products with a weight matrix."""

from __future__ import annotations

import torch
from torch.nn import functional

from stoker_engine.kernels.native.library import kernels_for
from stoker_engine.kernels.native.linear import linear as native_linear


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x Wᵀ + b: [..., inner] → [..., outputs], for `weight` [outputs, inner] and `bias` [outputs] in x's dtype.

    Sums in float32, and rounds once. On a CPU with native kernels a row's result is the same in every batch, bit for
    bit; torch's own products differ with the number of rows.
    """
    library = kernels_for(x)
    if library is None:
        return functional.linear(x, weight, bias)
    return native_linear(library, x, weight, bias)
