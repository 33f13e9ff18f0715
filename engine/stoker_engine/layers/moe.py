"""The mixture-of-experts layer, in place of a decoder layer's MLP.

Slots: ``router.weight``, ``router.correction_bias``, ``experts.{e}.{gate, up, down}.weight``,
``shared.{gate, up, down}.weight`` and ``shared_gate.weight``. A router's correction bias stays float32: it decides
between scores that may be close.
"""

from __future__ import annotations

import torch
from torch import nn

from stoker_engine.architectures.moe_config import MoEConfig
from stoker_engine.kernels.activation import act_and_mul, activation
from stoker_engine.kernels.linear import linear
from stoker_engine.kernels.moe import experts, route, sigmoid
from stoker_engine.layers.linear import MergedLinear
from stoker_engine.quant.slot import Slot


class MoE(nn.Module):
    """Each token goes to a few experts, which a router chooses, and to the shared experts.

    Args:
        act: the gates' activation, by its config.json name.
    """

    def __init__(self, config: MoEConfig, hidden_size: int, act: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.act = activation(act)
        size = config.intermediate_size
        self.router = _empty(config.num_experts, hidden_size, dtype=dtype)
        self.correction_bias = _empty(config.num_experts, dtype=torch.float32) if config.correction_bias else None
        self.gate_up = _empty(config.num_experts, 2 * size, hidden_size, dtype=dtype)
        self.down = _empty(config.num_experts, hidden_size, size, dtype=dtype)
        shared = config.shared_intermediate_size
        self.shared_gate_up = (
            MergedLinear(hidden_size, {"gate": shared, "up": shared}, False, dtype) if shared else None
        )
        self.shared_down = MergedLinear(shared, {"down": hidden_size}, False, dtype) if shared else None
        self.shared_gate = _empty(1, hidden_size, dtype=dtype) if config.shared_gate else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] → [tokens, hidden]."""
        # In float32: experts whose scores are close must not be chosen by rounding.
        logits = linear(x.float(), self.router.float())
        weights, chosen = route(logits, self.config, self.correction_bias)
        routed = experts(x, weights, chosen, self.gate_up, self.down, self.act)
        return routed if self.shared_gate_up is None else routed + self._shared(x)

    def _shared(self, x: torch.Tensor) -> torch.Tensor:
        assert self.shared_gate_up is not None and self.shared_down is not None
        shared: torch.Tensor = self.shared_down(act_and_mul(self.shared_gate_up(x), self.act))
        return shared if self.shared_gate is None else sigmoid(linear(x, self.shared_gate)).to(x.dtype) * shared

    def slots(self, prefix: str) -> dict[str, Slot]:
        """The places a loader fills, by name."""
        size = self.config.intermediate_size
        slots = {f"{prefix}.router.weight": Slot.whole(self.router.data)}
        if self.correction_bias is not None:
            slots[f"{prefix}.router.correction_bias"] = Slot.whole(self.correction_bias.data)
        for expert in range(self.config.num_experts):
            slots[f"{prefix}.experts.{expert}.gate.weight"] = Slot.whole(self.gate_up.data[expert, :size])
            slots[f"{prefix}.experts.{expert}.up.weight"] = Slot.whole(self.gate_up.data[expert, size:])
            slots[f"{prefix}.experts.{expert}.down.weight"] = Slot.whole(self.down.data[expert])
        if self.shared_gate_up is not None and self.shared_down is not None:
            slots.update(self.shared_gate_up.slots(f"{prefix}.shared"))
            slots.update(self.shared_down.slots(f"{prefix}.shared"))
        if self.shared_gate is not None:
            slots[f"{prefix}.shared_gate.weight"] = Slot.whole(self.shared_gate.data)
        return slots


def _empty(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)
