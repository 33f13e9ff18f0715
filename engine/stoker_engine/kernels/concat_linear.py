"""Products with the same x, whose results lie side by side."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stoker_engine.kernels.bundle import Operation


def side_by_side(products: Sequence[Operation]) -> Operation:
    """[..., inner] → [..., the outputs of all]."""
    return lambda x: torch.cat([product(x) for product in products], dim=-1)
