"""Feed-forward block (MLP), gated or not."""

from __future__ import annotations

import torch
from torch import nn

from stoker_engine.architectures.decoder_config import MLPConfig
from stoker_engine.layers.batch_rows import RowSpace
from stoker_engine.layers.build import Build
from stoker_engine.layers.linear import MergedLinear
from stoker_engine.quant.weight_target import Shard, WeightTarget


class MLP(nn.Module):
    """down(act(gate(x)) × up(x)), or down(act(up(x))).

    WeightTargets: ``prefix.gate``, ``prefix.up`` and ``prefix.down``.

    Args:
        space: row space of x.

    Raises:
        ModelError: the activation is not supported, or the block cannot be split across the ranks.
    """

    def __init__(
        self, build: Build, prefix: str, config: MLPConfig, hidden_size: int, space: RowSpace = RowSpace.TOKENS
    ) -> None:
        super().__init__()
        inner = build.share(config.size, build.linear([f"{prefix}.down.weight"]).column_multiple)
        hidden = Shard.whole(hidden_size)
        parts = {"gate": inner, "up": inner} if config.gated else {"up": inner}
        self.up = MergedLinear(build, prefix, hidden, parts, config.bias, space=space)
        self.down = MergedLinear(build, prefix, inner, {"down": hidden}, config.bias, space=space)
        self.config = config
        self.act = (build.kernels.act_and_mul if config.gated else build.kernels.activation)(config.act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] → [tokens, hidden]."""
        return self.down(self.act(self.up(x)))

    __call__ = forward

    def weight_targets(self) -> dict[str, WeightTarget]:
        """Return the targets that a checkpoint must fill, by parameter name."""
        return {**self.up.weight_targets(), **self.down.weight_targets()}
