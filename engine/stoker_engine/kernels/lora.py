"""What adapters add to a linear operation (LoRA): y + (x Aᵀ) Bᵀ, each row of x by its own adapter.

Adapters are in slots; a row says which one is its own. An operation may merge several matrices, whose results lie side
by side: an adapter's *parts* are what it adds to each of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch


class LoraPart(NamedTuple):
    """What an adapter adds to one of the matrices that an operation merges.

    Attributes:
        a: [rank, inner]; parts may share one.
        b: [outputs, rank], scaled.
        first_output: where its outputs begin in the operation's.
    """

    a: torch.Tensor
    b: torch.Tensor
    first_output: int


def add_lora(y: torch.Tensor, x: torch.Tensor, slots: torch.Tensor, adapters: Mapping[int, Sequence[LoraPart]]) -> None:
    """Adds to each row of y what its adapter makes of the row of x. The host waits for the device.

    Args:
        y: [rows, outputs], changed in place.
        x: [rows, inner].
        slots: int64 [rows], -1 for none.
        adapters: their parts, by slot; those that change nothing here are missing.
    """
    for slot in sorted(set(slots.tolist()) & set(adapters)):
        rows = (slots == slot).nonzero().squeeze(1)
        taken = x[rows]
        for a, b, first in adapters[slot]:
            added = (taken.to(a.dtype) @ a.T) @ b.T
            y[rows, first : first + len(b)] += added.to(y.dtype)
