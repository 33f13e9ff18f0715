"""Linear operations with the same input, whose outputs are concatenated."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stoker_engine.kernels.bundle import Operation


def concat_linear(linears: Sequence[Operation]) -> Operation:
    """Return the operation [..., inner] → [..., sum of outputs]."""
    return lambda x: torch.cat([linear(x) for linear in linears], dim=-1)
