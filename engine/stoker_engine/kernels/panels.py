"""Weights in panels: the order in which the widest of the CPU's kernels read a matrix.

    rows      [outputs][inner]                    as checkpoints have them
    panels    [outputs / 16][inner / 2][16][2]    16 rows beside each other, two numbers of each at a time

A panel takes the memory that its rows took, so a matrix is packed where it is. Rows beyond the last whole panel stay.
"""

from __future__ import annotations

from typing import Final

import torch

#: Rows in a panel.
PANEL: Final = 16


def can_be_packed(weight: torch.Tensor) -> bool:
    """Whether a matrix [outputs, inner] has a panel, and its numbers lie as panels need them."""
    return weight.is_contiguous() and len(weight) >= PANEL and weight.shape[1] % 2 == 0


def packed(weight: torch.Tensor) -> torch.Tensor:
    """`weight` [outputs, inner] in panels, in the same shape."""
    outputs, inner = weight.shape
    whole = outputs // PANEL * PANEL
    panels = weight[:whole].view(-1, PANEL, inner // 2, 2).transpose(1, 2).reshape(whole, inner)
    return torch.cat((panels, weight[whole:]))
