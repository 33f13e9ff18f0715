"""Normalisation layers. Their weights are replicated on every rank."""

from __future__ import annotations

import torch
from torch import nn

from stoker_engine.architectures.decoder_config import NormConfig
from stoker_engine.kernels.bundle import QuantizedRows, QuantizingKernels
from stoker_engine.kernels.rms_norm import after_sum
from stoker_engine.layers.build import Build
from stoker_engine.quant.weight_target import Shard, WeightTarget


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last dimension. See `kernels.rms_norm` for the weight's dtype."""

    def __init__(self, build: Build, prefix: str, size: int, eps: float, wide: bool = False) -> None:
        super().__init__()
        dtype = torch.float32 if wide else build.dtype
        self._name = f"{prefix}.weight"
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)
        self.eps = eps
        self._norm = build.kernels.rms_norm(self.weight.data, eps)
        self._sum_and_norm = build.kernels.add_rms_norm(self.weight.data, eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] → [..., size]."""
        return self._norm(x)

    __call__ = forward

    def after_sum(self, x: torch.Tensor, added: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum `x + added` and the normalized sum; all are [tokens, size]."""
        return self._sum_and_norm(x, added)

    def weight_targets(self) -> dict[str, WeightTarget]:
        """Return the targets that a checkpoint must fill, by parameter name."""
        return {self._name: WeightTarget.whole(self.weight.data)}


class QuantizedRMSNorm:
    """An RMS norm whose result is quantized."""

    def __init__(self, norm: RMSNorm, kernels: QuantizingKernels) -> None:
        self._norm = kernels.rms_norm(norm.weight.data, norm.eps)
        self._sum_and_norm = kernels.add_rms_norm(norm.weight.data, norm.eps)

    def __call__(self, x: torch.Tensor) -> QuantizedRows:
        """[rows, size] → its normalised rows."""
        return self._norm(x)

    def after_sum(self, x: torch.Tensor, added: torch.Tensor) -> tuple[torch.Tensor, QuantizedRows]:
        """Return `x + added`, [rows, size], and its normalised rows."""
        return self._sum_and_norm(x, added)


class LayerNorm(nn.Module):
    """Normalisation by mean and variance over the last dimension.

    Args:
        heads: heads that this rank normalises, if each head has its own weights (``prefix.{head}.weight``); None: there
            is one weight vector.
    """

    def __init__(self, build: Build, prefix: str, config: NormConfig, size: int, heads: Shard | None = None) -> None:
        super().__init__()
        dtype = torch.float32 if config.wide else build.dtype
        shape = (size,) if heads is None else (heads.full, size)
        self._prefix = prefix
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False) if config.weight else None
        self.bias = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False) if config.bias else None

        def ours(parameter: nn.Parameter | None) -> torch.Tensor | None:
            if parameter is None or heads is None:
                return None if parameter is None else parameter.data
            return parameter.data[heads.positions]

        self._norm = build.kernels.layer_norm(ours(self.weight), ours(self.bias), config.eps)
        self._sum_and_norm = after_sum(self._norm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] → [..., size], or the same with [..., heads, size]."""
        return self._norm(x)

    __call__ = forward

    def after_sum(self, x: torch.Tensor, added: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `RMSNorm`."""
        return self._sum_and_norm(x, added)

    def weight_targets(self) -> dict[str, WeightTarget]:
        """Return the targets that a checkpoint must fill, by parameter name."""
        targets = {}
        for name, parameter in (("weight", self.weight), ("bias", self.bias)):
            if parameter is None:
                continue
            if parameter.dim() == 1:
                targets[f"{self._prefix}.{name}"] = WeightTarget.whole(parameter.data)
            else:
                rows = enumerate(parameter.data)
                targets.update({f"{self._prefix}.{head}.{name}": WeightTarget.whole(row) for head, row in rows})
        return targets


Norm = RMSNorm | LayerNorm


def make_norm(build: Build, prefix: str, config: NormConfig, size: int, heads: Shard | None = None) -> Norm:
    """Create the norm that `config` describes."""
    if config.kind == "rms":
        assert config.weight and not config.bias and heads is None, "a root-mean-square norm has one weight"
        return RMSNorm(build, prefix, size, config.eps, config.wide)
    return LayerNorm(build, prefix, config, size, heads)
