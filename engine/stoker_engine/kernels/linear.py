"""Products with a weight matrix."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from stoker_engine.kernels.native.library import kernels_for
from stoker_engine.kernels.native.linear import product as native_product


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x Wᵀ + b: [..., inner] → [..., outputs], for `weight` [outputs, inner] and `bias` [outputs] in x's dtype.

    Sums in float32, and rounds once. On a CPU with native kernels a row's result is the same in every batch, bit for
    bit; torch's own products differ with the number of rows.
    """
    library = kernels_for(x)
    if library is None:
        return functional.linear(x, weight, bias)
    return native_product(library, weight, bias)(x)


def product(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Callable[[torch.Tensor], torch.Tensor]:
    """`linear` with this weight and bias. What does not change from call to call is looked up once: at one token a
    step that takes longer than small products themselves. The tensors must stay where they are; their numbers may
    change.
    """
    library = kernels_for(weight)
    if library is None:
        return lambda x: functional.linear(x, weight, bias)
    return native_product(library, weight, bias)
