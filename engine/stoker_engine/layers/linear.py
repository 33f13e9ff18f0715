"""Linear layers. One module may hold several of a checkpoint's matrices, so that they run as one product."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from stoker_engine.kernels.linear import product
from stoker_engine.quant.slot import Slot


class MergedLinear(nn.Module):
    """y = x Wᵀ + b, with W the concatenation of named parts along the output.

    Args:
        parts: output size of each named part, in order (``{"q": 1024, "k": 256, "v": 256}``).
    """

    def __init__(self, input_size: int, parts: dict[str, int], bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.sizes = list(parts.values())
        output_size = sum(self.sizes)
        self.weight = nn.Parameter(torch.empty(output_size, input_size, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(output_size, dtype=dtype), requires_grad=False) if bias else None
        self._product: Callable[[torch.Tensor], torch.Tensor] | None = None
        self._rows: dict[str, slice] = {}
        start = 0
        for name, size in parts.items():
            self._rows[name] = slice(start, start + size)
            start += size

    def slots(self, prefix: str) -> dict[str, Slot]:
        """The places a loader fills, by name: ``prefix.part.weight`` and ``prefix.part.bias``."""
        slots = {}
        for name, rows in self._rows.items():
            slots[f"{prefix}.{name}.weight"] = Slot.whole(self.weight[rows])
            if self.bias is not None:
                slots[f"{prefix}.{name}.bias"] = Slot.whole(self.bias[rows])
        return slots

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, input_size] → [tokens, sum of the parts]."""
        if self._product is None:  # not before: a tied lm_head gets its weight late
            self._product = product(self.weight, self.bias)
        return self._product(x)

    __call__ = forward
