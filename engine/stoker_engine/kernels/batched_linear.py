"""A linear layer with a weight matrix of each head's own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stoker_engine.kernels.bundle import Operation


def batched_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x` [tokens, heads, inner], `weight` [heads, outputs, inner] → [tokens, heads, outputs].

    With the CPU's kernels a row's result is the same in every batch, as `linear`'s is.
    """
    return (x.transpose(0, 1) @ weight.transpose(1, 2)).transpose(0, 1)


def by_head(linears: Sequence[Operation]) -> Operation:
    """The same by a linear operation of each head's own."""
    return lambda x: torch.stack([linear(x[:, head]) for head, linear in enumerate(linears)], dim=1)
