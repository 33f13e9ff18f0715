"""LoRA adapters of a linear operation: y + (x Aᵀ) Bᵀ, with a separate adapter for each row of x.

Adapters are in slots; each row has a slot index. An operation may merge several matrices, whose outputs are
concatenated: an adapter has a *part* for each matrix that it changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch


class LoraPart(NamedTuple):
    """An adapter's factors for one of the matrices that an operation merges.

    Attributes:
        a: [rank, inner]; parts may share the tensor.
        b: [outputs, rank], scaled.
        first_output: index of the matrix's first output among the operation's outputs.
    """

    a: torch.Tensor
    b: torch.Tensor
    first_output: int


def add_lora(y: torch.Tensor, x: torch.Tensor, slots: torch.Tensor, adapters: Mapping[int, Sequence[LoraPart]]) -> None:
    """Add the result of each row's adapter to `y`. Synchronizes with the device.

    Args:
        y: [rows, outputs], changed in place.
        x: [rows, inner].
        slots: int64 [rows], -1 for none.
        adapters: parts by slot; slots whose adapter does not change this operation are missing.
    """
    for slot in sorted(set(slots.tolist()) & set(adapters)):
        rows = (slots == slot).nonzero().squeeze(1)
        taken = x[rows]
        for a, b, first in adapters[slot]:
            added = (taken.to(a.dtype) @ a.T) @ b.T
            y[rows, first : first + len(b)] += added.to(y.dtype)
