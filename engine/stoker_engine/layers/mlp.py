"""Feed-forward block (MLP), gated or not."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from stoker_engine.architectures.decoder_config import MLPConfig
from stoker_engine.kernels.bundle import Activations, Kernels, QuantizingKernels, RowFormat
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
        self.act: Callable[[torch.Tensor], Activations] = _activation(build.kernels, config)
        self._quantizing = build.kernels.quantizing

    def quantize_early(self) -> RowFormat | None:
        """Let the activation quantize its result if `down` takes quantized rows. Call this after weights are prepacked.

        Returns:
            Format of the `QuantizedRows` that `forward` also takes; None if it takes none.
        """
        if (format := self.down.row_format) in self._quantizing:
            self.act = _activation(self._quantizing[format], self.config)
        return self.up.row_format

    def forward(self, x: Activations) -> torch.Tensor:
        """[tokens, hidden] → [tokens, hidden]. See `quantize_early`."""
        return self.down(self.act(self.up(x)))

    __call__ = forward

    def weight_targets(self) -> dict[str, WeightTarget]:
        """Return the targets that a checkpoint must fill, by parameter name."""
        return {**self.up.weight_targets(), **self.down.weight_targets()}


def _activation(kernels: Kernels | QuantizingKernels, config: MLPConfig) -> Callable[[torch.Tensor], Activations]:
    return (kernels.act_and_mul if config.gated else kernels.activation)(config.act)
