"""Rotary position embedding (Su et al., 2021), in the half-split layout of GPT-NeoX and Llama."""

from __future__ import annotations

import torch


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates `x` [tokens, heads, d] by the angles whose `cos` and `sin` [tokens, 1, d] are given.

    Pair (i, i + d/2) is one complex number; cos and sin hold each angle twice.
    """
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
