"""Products with the same x, whose results lie side by side."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stoker_engine.kernels.bundle import Operation


def concat_linear(linears: Sequence[Operation]) -> Operation:
    """[..., inner] → [..., the outputs of all]."""
    return lambda x: torch.cat([linear(x) for linear in linears], dim=-1)
