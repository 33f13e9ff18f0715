"""How tensors of rows are walked over."""

from __future__ import annotations

import torch


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """``[..., d]`` as [outer, inner, d], whose last numbers lie side by side: without a copy where that is a part of a
    larger matrix, as the heads of queries are.
    """
    if x.stride(-1) != 1:
        x = x.contiguous()
    if x.dim() == 3:
        return x
    return x.unsqueeze(1) if x.dim() == 2 else x.reshape(-1, 1, x.shape[-1])


def warps_for(numbers: int) -> int:
    """For a program that has so many numbers at once: some 16 for each thread."""
    return max(1, min(16, numbers // 512))
