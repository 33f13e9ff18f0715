"""A mixture of experts, compared with the same mixture by torch's grouped GEMM."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from gpu_parts.context import Context
from gpu_parts.figures import Figure
from gpu_parts.scale import Mixture
from gpu_parts.timing import median_ms
from stoker_engine.architectures.moe_config import MoEConfig
from stoker_engine.kernels.select import select_kernels

#: torch's grouped GEMM: public since torch 2.10.
_GROUPED: Any = getattr(functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


def measure(context: Context) -> None:
    """Record the figures: one layer, times the number of layers."""
    mixture, device = context.scale.mixture, context.device
    layer = Layer(mixture, device)
    settings = (
        f"{mixture.experts} experts, {mixture.chosen} of them a token, {mixture.hidden} × {mixture.intermediate}, "
        f"bf16; one layer with its router, times {mixture.layers}"
    )
    for tokens in context.scale.mixture_tokens:
        x = torch.randn(tokens, mixture.hidden, dtype=torch.bfloat16, device=device)
        used = len(layer.route(layer.router(x))[1].unique())
        expert = 3 * mixture.hidden * mixture.intermediate
        took = median_ms(lambda x=x: layer.ours(x), device)  # type: ignore[misc]
        peers = {}
        if _GROUPED is not None:
            try:
                peers["F.grouped_mm"] = mixture.layers * median_ms(lambda x=x: layer.by_torch(x), device)  # type: ignore[misc]
            except RuntimeError as error:
                print(f"F.grouped_mm does not run here: {str(error).partition(chr(10))[0]}")
        context.add(
            Figure(
                f"mixture/{mixture.name}/{tokens}",
                f"{mixture.name}'s mixtures, {tokens:,} token{'s' * (tokens > 1)}",
                mixture.layers * took,
                "ms",
                settings,
                least_bytes=mixture.layers * 2.0 * expert * used,
                least_flops=mixture.layers * 2.0 * expert * tokens * mixture.chosen,
                peers=peers,
            )
        )


class Layer:
    """One layer's mixture, twice: by Stoker's kernels, and by torch's operators."""

    def __init__(self, mixture: Mixture, device: torch.device) -> None:
        kernels = select_kernels(device, torch.bfloat16)
        torch.manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, dtype=torch.bfloat16, device=device).mul_(shape[-1] ** -0.5)

        self._mixture = mixture
        self._gate_up = random(mixture.experts, 2 * mixture.intermediate, mixture.hidden)
        self._down = random(mixture.experts, mixture.hidden, mixture.intermediate)
        self.router = kernels.float32_linear(random(mixture.experts, mixture.hidden), None)
        self.route = kernels.route(MoEConfig(mixture.experts, mixture.chosen, mixture.intermediate), None)
        self._experts = kernels.experts(self._gate_up, self._down, "silu")

    def ours(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] → [tokens, hidden], by the engine's kernels."""
        weights, chosen = self.route(self.router(x))
        return self._experts(x, weights, chosen)

    def by_torch(self, x: torch.Tensor) -> torch.Tensor:
        """The same by `torch.nn.functional.grouped_mm`, with the same router."""
        weights, chosen = self.route(self.router(x))
        experts = chosen.flatten()
        order = experts.argsort(stable=True)
        tokens = order // chosen.shape[1]
        every = torch.arange(self._mixture.experts, device=x.device)
        ends = (experts.unsqueeze(-1) == every).sum(0).cumsum(0).int()
        gate, up = _GROUPED(x[tokens], self._gate_up.transpose(1, 2), offs=ends).chunk(2, -1)
        inner = functional.silu(gate) * up
        results: torch.Tensor = _GROUPED(inner, self._down.transpose(1, 2), offs=ends)
        scaled = results.float() * weights.flatten()[order].unsqueeze(-1)
        total: torch.Tensor = torch.zeros(x.shape, device=x.device).index_add_(0, tokens, scaled)
        return total.to(x.dtype)
