"""Iteration over the rows of tensors."""

from __future__ import annotations

import torch


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """Return ``[..., d]`` as [outer, inner, d], contiguous in the last dimension.

    Two- or three-dimensional slices of larger matrices, such as the heads of queries, are not copied.
    """
    if x.stride(-1) != 1:
        x = x.contiguous()
    if x.dim() == 3:
        return x
    return x.unsqueeze(1) if x.dim() == 2 else x.reshape(-1, 1, x.shape[-1])


def warps_for(numbers: int) -> int:
    """Return the number of warps for `numbers` elements: 1 to 16, with about 16 elements per thread."""
    return max(1, min(16, numbers // 512))
