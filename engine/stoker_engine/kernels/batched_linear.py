"""Linear operation with a separate weight matrix for each head."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stoker_engine.kernels.bundle import Operation


def batched_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply `x` [tokens, heads, inner] with `weight` [heads, outputs, inner] → [tokens, heads, outputs].

    The CPU kernels are batch-invariant, see `linear`.
    """
    return (x.transpose(0, 1) @ weight.transpose(1, 2)).transpose(0, 1)


def by_head(linears: Sequence[Operation]) -> Operation:
    """Return the operation of `batched_linear`, computed by one linear operation for each head."""
    return lambda x: torch.stack([linear(x[:, head]) for head, linear in enumerate(linears)], dim=1)
