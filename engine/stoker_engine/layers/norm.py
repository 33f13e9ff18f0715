"""Normalisation layers."""

from __future__ import annotations

import torch
from torch import nn

from stoker_engine.kernels.rms_norm import rms_norm


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last dimension. See `rms_norm` for the weight's dtype."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] → [..., size]."""
        return rms_norm(x, self.weight, self.eps)
