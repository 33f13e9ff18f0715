"""A product with a weight matrix of each head's own."""

from __future__ import annotations

import torch

from stoker_engine.kernels.linear import linear
from stoker_engine.kernels.native.library import kernels_for


def batched_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x` [tokens, heads, inner], `weight` [heads, outputs, inner] → [tokens, heads, outputs].

    On a CPU with native kernels a row's result is the same in every batch, as `linear`'s is.
    """
    if kernels_for(x) is None:
        return (x.transpose(0, 1) @ weight.transpose(1, 2)).transpose(0, 1)
    return torch.stack([linear(x[:, head], each) for head, each in enumerate(weight)], dim=1)
