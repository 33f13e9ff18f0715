"""Weights in panels, the layout of matrices for CPU kernels with vectors of 32 bytes or more.

    rows      [outputs][inner]                    as in checkpoints
    panels    [outputs / 16][inner / 2][16][2]    16 rows interleaved, two elements of each at a time

Rows of GGUF blocks are interleaved by two-byte words:

    rows      [outputs][words]
    panels    [outputs / 16][words][16]

Rows of groups are interleaved part by part:

    rows      [outputs][scales, zero points, words of codes]
    panels    [outputs / 16][scales [groups][16], zero points [groups][16], words of four bytes of codes [words][16]]

A panel needs as much memory as its rows, so matrices are packed in place. Rows after the last whole panel are not
packed.
"""

from __future__ import annotations

from typing import Final

import torch

#: Number of rows in a panel.
PANEL: Final = 16

#: Largest number of ids that are checked in Python instead of by torch.
_FEW: Final = 64


def can_be_packed(weight: torch.Tensor) -> bool:
    """Whether a matrix [outputs, inner] has at least one panel, and a layout that can be packed."""
    return weight.is_contiguous() and len(weight) >= PANEL and weight.shape[1] % 2 == 0


def packed(weight: torch.Tensor) -> torch.Tensor:
    """Return `weight` [outputs, inner] packed into panels, in the same shape."""
    outputs, inner = weight.shape
    whole = outputs // PANEL * PANEL
    panels = weight[:whole].view(-1, PANEL, inner // 2, 2).transpose(1, 2).reshape(whole, inner)
    return panels if whole == outputs else torch.cat((panels, weight[whole:]))


def checked(ids: torch.Tensor, rows: int) -> torch.Tensor:
    """Check row indices; return `ids` (int64 [count]) as a contiguous tensor.

    Raises:
        IndexError: an index is not in 0 … `rows` - 1.
    """
    assert ids.dtype == torch.int64 and ids.dim() == 1
    if len(ids):
        if len(ids) <= _FEW:  # decode: a single torch operator would take longer than this
            few = ids.tolist()
            lowest, highest = min(few), max(few)
        else:
            lowest, highest = (int(bound) for bound in torch.aminmax(ids))
        if lowest < 0 or highest >= rows:
            raise IndexError(f"row indices {lowest} to {highest} are out of range for a table of {rows}")
    return ids.contiguous()
