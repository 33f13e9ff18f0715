"""The feed-forward block, with a gate or without."""

from __future__ import annotations

import torch
from torch import nn

from stoker_engine.architectures.decoder_config import MLPConfig
from stoker_engine.kernels.activation import act_and_mul, activation
from stoker_engine.layers.linear import MergedLinear
from stoker_engine.quant.slot import Slot


class MLP(nn.Module):
    """down(act(gate(x)) × up(x)), or down(act(up(x))).

    Slots: ``gate``, ``up`` and ``down``.
    """

    def __init__(self, config: MLPConfig, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.gated = config.gated
        parts = {"gate": config.size, "up": config.size} if config.gated else {"up": config.size}
        self.up = MergedLinear(hidden_size, parts, config.bias, dtype)
        self.down = MergedLinear(config.size, {"down": hidden_size}, config.bias, dtype)
        self.act = activation(config.act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] → [tokens, hidden]."""
        inner = self.up(x)
        return self.down(act_and_mul(inner, self.act) if self.gated else self.act(inner))

    __call__ = forward

    def slots(self, prefix: str) -> dict[str, Slot]:
        """The places a loader fills, by name."""
        return {**self.up.slots(prefix), **self.down.slots(prefix)}
