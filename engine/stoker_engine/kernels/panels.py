"""Weights in panels: the order in which the widest of the CPU's kernels read a matrix.

    rows      [outputs][inner]                    as checkpoints have them
    panels    [outputs / 16][inner / 2][16][2]    16 rows beside each other, two numbers of each at a time

Matrices in GGUF's blocks in the same way, the words of two bytes that their rows are made of:

    rows      [outputs][words]
    panels    [outputs / 16][words][16]

And matrices in groups, each part of their rows by itself:

    rows      [outputs][scales, zero points, words of codes]
    panels    [outputs / 16][scales [groups][16], zero points [groups][16], words of four bytes of codes [words][16]]

A panel takes the memory that its rows took, so a matrix is packed where it is. Rows beyond the last whole panel stay.
"""

from __future__ import annotations

from typing import Final

import torch

#: Rows in a panel.
PANEL: Final = 16

#: Numbers that Python looks through by itself.
_FEW: Final = 64


def can_be_packed(weight: torch.Tensor) -> bool:
    """Whether a matrix [outputs, inner] has a panel, and its numbers lie as panels need them."""
    return weight.is_contiguous() and len(weight) >= PANEL and weight.shape[1] % 2 == 0


def packed(weight: torch.Tensor) -> torch.Tensor:
    """`weight` [outputs, inner] in panels, in the same shape."""
    outputs, inner = weight.shape
    whole = outputs // PANEL * PANEL
    panels = weight[:whole].view(-1, PANEL, inner // 2, 2).transpose(1, 2).reshape(whole, inner)
    return panels if whole == outputs else torch.cat((panels, weight[whole:]))


def checked(ids: torch.Tensor, rows: int) -> torch.Tensor:
    """`ids` [count] int64 without gaps.

    Raises:
        IndexError: one is no row of so many.
    """
    assert ids.dtype == torch.int64 and ids.dim() == 1
    if len(ids):
        if len(ids) <= _FEW:  # decodes: one operator of torch takes longer than all of this
            few = ids.tolist()
            lowest, highest = min(few), max(few)
        else:
            lowest, highest = (int(bound) for bound in torch.aminmax(ids))
        if lowest < 0 or highest >= rows:
            raise IndexError(f"rows {lowest} to {highest} of {rows}")
    return ids.contiguous()
