"""Layer normalisation (Ba et al., 2016)."""

from __future__ import annotations

import torch
from torch.nn import functional


def layer_norm(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Normalise the last dimension of `x` [..., d] by mean and variance; computed in float32, rounded to x's dtype.

    `weight` is [d], or [heads, d] for an `x` of [..., heads, d]; `bias` has the same shape. Either may be None.
    """
    if weight is None or weight.dim() == 1:
        return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
    scaled = functional.layer_norm(x.float(), x.shape[-1:], None, None, eps) * weight
    return (scaled if bias is None else scaled + bias).to(x.dtype)
