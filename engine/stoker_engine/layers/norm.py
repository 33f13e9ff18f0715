"""Normalisation layers."""

from __future__ import annotations

import torch
from torch import nn

from stoker_engine.architectures.decoder_config import NormConfig
from stoker_engine.kernels.layer_norm import layer_norm
from stoker_engine.kernels.rms_norm import rms_norm
from stoker_engine.quant.slot import Slot


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last dimension. See `rms_norm` for the weight's dtype."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] → [..., size]."""
        return rms_norm(x, self.weight, self.eps)

    __call__ = forward

    def slots(self, prefix: str) -> dict[str, Slot]:
        """The places a loader fills, by name."""
        return {f"{prefix}.weight": Slot.whole(self.weight.data)}


class LayerNorm(nn.Module):
    """Normalisation by mean and variance over the last dimension.

    Args:
        size: of the last dimension.
        heads: each head has weights of its own, slots ``prefix.{head}.weight``; None: one set.
    """

    def __init__(
        self, size: int, eps: float, dtype: torch.dtype, *, weight: bool, bias: bool, heads: int | None = None
    ) -> None:
        super().__init__()
        shape = (size,) if heads is None else (heads, size)
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False) if weight else None
        self.bias = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False) if bias else None
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] → [..., size], or [..., heads, size] likewise."""
        return layer_norm(x, self.weight, self.bias, self.eps)

    __call__ = forward

    def slots(self, prefix: str) -> dict[str, Slot]:
        """The places a loader fills, by name."""
        slots = {}
        for name, parameter in (("weight", self.weight), ("bias", self.bias)):
            if parameter is None:
                continue
            if parameter.dim() == 1:
                slots[f"{prefix}.{name}"] = Slot.whole(parameter.data)
            else:
                slots.update({f"{prefix}.{head}.{name}": Slot.whole(row) for head, row in enumerate(parameter.data)})
        return slots


Norm = RMSNorm | LayerNorm


def make_norm(config: NormConfig, size: int, dtype: torch.dtype, heads: int | None = None) -> Norm:
    """The norm that `config` describes, in a model of `dtype`."""
    dtype = torch.float32 if config.wide else dtype
    if config.kind == "rms":
        assert config.weight and not config.bias and heads is None, "a root-mean-square norm has one weight"
        return RMSNorm(size, config.eps, dtype)
    return LayerNorm(size, config.eps, dtype, weight=config.weight, bias=config.bias, heads=heads)
