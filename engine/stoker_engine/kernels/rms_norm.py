"""Root-mean-square normalisation (Zhang & Sennrich, 2019)."""

from __future__ import annotations

from collections.abc import Callable

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise the last dimension of `x` [..., d] and scale it by `weight` [d]; computed in float32.

    Model families differ in where they round: with a float32 `weight` the product is rounded to x's dtype (Gemma); with
    a weight in x's dtype the normalised value is rounded before it is scaled (Llama).
    """
    wide = x.float()
    normalised = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight.dtype == torch.float32:
        return (normalised * weight).to(x.dtype)
    return normalised.to(x.dtype) * weight


def after_sum(
    norm: Callable[[torch.Tensor], torch.Tensor],
) -> Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Return the operation (x, added), both [..., d] → their sum, rounded to x's dtype, and its norm."""

    def sum_and_norm(x: torch.Tensor, added: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + added
        return total, norm(total)

    return sum_and_norm
