"""Mixture-of-experts layer, which replaces the MLP of a decoder layer.

WeightTargets: ``router.{weight, bias, correction_bias}``, ``experts.{e}.{gate, up, down}.{weight, bias, columns}``,
``shared.{gate, up, down}.{weight, columns}`` and ``shared_gate.weight``. A router's correction bias stays float32,
because it decides between scores that may be close.

Every rank routes all tokens and computes either its shard of every expert (tensor parallelism) or its own whole experts
(expert parallelism); one all-reduce adds up the results. If an expert is split across ranks, only rank 0 adds the bias
of its output.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from stoker_common.errors import ModelError
from stoker_engine.architectures.activation import Activation
from stoker_engine.architectures.moe_config import MoEConfig
from stoker_engine.kernels.bundle import Activations, Experts, Operation, RowFormat
from stoker_engine.kernels.moe import experts, sigmoid
from stoker_engine.layers.batch_rows import RowSpace
from stoker_engine.layers.build import Build
from stoker_engine.layers.linear import MergedLinear
from stoker_engine.quant.method import Matrix, Products
from stoker_engine.quant.segments import merged
from stoker_engine.quant.weight_target import Shard, WeightTarget


class MoE(nn.Module):
    """Mixture of experts: each token goes to a few experts chosen by a router, and to the shared experts, if any.

    Args:
        act: activation of the gates.
        space: row space of x.

    Raises:
        ModelError: the activation is not supported, or the experts cannot be split across the ranks.
    """

    def __init__(
        self,
        build: Build,
        prefix: str,
        config: MoEConfig,
        hidden_size: int,
        act: Activation,
        space: RowSpace = RowSpace.TOKENS,
    ) -> None:
        super().__init__()
        self.config, self._prefix, self._ranks, self._space = config, prefix, build.ranks, space
        self._hidden = Shard.whole(hidden_size)
        self.router = _empty(config.num_experts, hidden_size, dtype=build.dtype)
        self.router_bias = _empty(config.num_experts, dtype=build.dtype) if config.router_bias else None
        self.correction_bias = _empty(config.num_experts, dtype=torch.float32) if config.correction_bias else None
        correction = None if self.correction_bias is None else self.correction_bias.data
        router_bias = None if self.router_bias is None else self.router_bias.data
        router = build.kernels.float32_linear(self.router.data, router_bias)
        outputs = {f"{prefix}.router": Shard.whole(config.num_experts)}
        self._router = build.extended(router, outputs, self._hidden, space)
        self._route = build.kernels.route(config, correction)
        gate, up, down = (
            build.linear([f"{prefix}.experts.{e}.{part}.weight" for e in range(config.num_experts)])
            for part in ("gate", "up", "down")
        )
        if build.whole_experts:
            self._ours, self._inner = build.experts(config.num_experts), Shard.whole(config.intermediate_size)
        else:
            self._ours = Shard.whole(config.num_experts)
            self._inner = build.share(config.intermediate_size, down.column_multiple)
        if down.whole_columns and not self._inner.is_whole:
            raise ModelError(
                f"{prefix}.experts are stored in activation order (act order), "
                f"so they cannot be split across {build.ranks.size} ranks; choose --tensor-parallel-size 1"
            )
        size, count = self._inner.size, self._ours.size
        self.gate_up: Products = merged([(gate, size), (up, size)], hidden_size, build.dtype, build.kernels, count)
        self.down: Matrix = down.create(hidden_size, size, build.dtype, build.kernels, count)
        self.gate_up_bias = self.down_bias = None
        biases: tuple[torch.Tensor | None, torch.Tensor | None] = None, None
        if config.bias:
            self.gate_up_bias = _empty(count, 2 * size, dtype=build.dtype)
            self.down_bias = _empty(count, hidden_size, dtype=build.dtype)
            has_results = build.whole_experts or build.ranks.rank == 0
            biases = self.gate_up_bias.data, self.down_bias.data if has_results else None
        self._experts = self.gate_up.experts(self.down, act, *biases)
        self._extended = None if build.extend is None else self._extended_experts(build, act, *biases)
        self._rows = build.rows
        self.shared_gate_up = self.shared_down = self.shared_gate = None
        if config.shared_intermediate_size:
            multiple = build.linear([f"{prefix}.shared.down.weight"]).column_multiple
            shared = build.share(config.shared_intermediate_size, multiple)
            name = f"{prefix}.shared"
            parts = {"gate": shared, "up": shared}
            self.shared_gate_up = MergedLinear(build, name, self._hidden, parts, False, space=space)
            parts = {"down": self._hidden}
            self.shared_down = MergedLinear(build, name, shared, parts, False, reduce=False, space=space)
            self._act: Callable[[torch.Tensor], Activations] = build.kernels.act_and_mul(act)
            self._act_name, self._quantizing = act, build.kernels.quantizing
        if config.shared_gate:
            self.shared_gate = _empty(1, hidden_size, dtype=build.dtype)
            shared_gate = build.kernels.linear(self.shared_gate.data)
            outputs = {f"{prefix}.shared_gate": Shard.whole(1)}
            self._shared_gate = build.extended(shared_gate, outputs, self._hidden, space)

    def _extended_experts(
        self, build: Build, act: Activation, biases: torch.Tensor | None, down_biases: torch.Tensor | None
    ) -> Experts:
        """Return experts that run one by one, because the grouped kernel does not apply adapters."""
        gate_up, down = list[Operation](), list[Operation]()
        each = zip(self.gate_up.linears(biases), self.down.linears(down_biases), strict=True)
        for expert, (up_linear, down_linear) in enumerate(each, start=self._ours.start):
            name = f"{self._prefix}.experts.{expert}"
            outputs = {f"{name}.gate": self._inner, f"{name}.up": self._inner}
            gate_up.append(build.extended(up_linear, outputs, self._hidden, RowSpace.EXPERTS))
            outputs = {f"{name}.down": self._hidden}
            down.append(build.extended(down_linear, outputs, self._inner, RowSpace.EXPERTS))

        def on_expert(tokens: torch.Tensor) -> None:
            build.rows.select(RowSpace.EXPERTS, self._space, tokens)

        return experts(gate_up, down, build.kernels.act_and_mul(act), on_expert)

    def quantize_early(self) -> RowFormat | None:
        """See `MLP.quantize_early`; it concerns the shared experts. The router and the routed experts need x itself."""
        if self.shared_down is not None and (format := self.shared_down.row_format) in self._quantizing:
            self._act = self._quantizing[format].act_and_mul(self._act_name)
        return None

    def forward(self, x: Activations) -> torch.Tensor:
        """[tokens, hidden] → [tokens, hidden]; never quantized rows."""
        assert isinstance(x, torch.Tensor)
        weights, chosen = self._route(self._router(x))
        if not self._ours.is_whole:  # renumber: this rank's experts first, from 0; larger indices are other ranks'
            chosen = (chosen - self._ours.start) % self._ours.full
        one_by_one = self._extended if self._rows.extends_experts else None
        routed = (one_by_one or self._experts)(x, weights, chosen)
        return self._ranks.all_reduce(routed if self.shared_gate_up is None else routed + self._shared(x))

    __call__ = forward

    def _shared(self, x: torch.Tensor) -> torch.Tensor:
        assert self.shared_gate_up is not None and self.shared_down is not None
        shared = self.shared_down(self._act(self.shared_gate_up(x)))
        return shared if self.shared_gate is None else sigmoid(self._shared_gate(x)).to(x.dtype) * shared

    def weight_targets(self) -> dict[str, WeightTarget]:
        """Return the targets that a checkpoint must fill, by parameter name."""
        prefix = self._prefix
        targets = {f"{prefix}.router.weight": WeightTarget.whole(self.router.data)}
        if self.router_bias is not None:
            targets[f"{prefix}.router.bias"] = WeightTarget.whole(self.router_bias.data)
        if self.correction_bias is not None:
            targets[f"{prefix}.router.correction_bias"] = WeightTarget.whole(self.correction_bias.data)
        elsewhere = {part: target.emptied() for part, target in self._expert_targets(0).items()}
        for expert in range(self._ours.full):
            is_local = self._ours.start <= expert < self._ours.stop
            parts = self._expert_targets(expert - self._ours.start) if is_local else elsewhere
            targets.update({f"{prefix}.experts.{expert}.{part}": target for part, target in parts.items()})
        if self.shared_gate_up is not None and self.shared_down is not None:
            targets.update(self.shared_gate_up.weight_targets())
            targets.update(self.shared_down.weight_targets())
        if self.shared_gate is not None:
            targets[f"{prefix}.shared_gate.weight"] = WeightTarget.whole(self.shared_gate.data)
        return targets

    def _expert_targets(self, index: int) -> dict[str, WeightTarget]:
        """Return the targets of one expert, given by its index among this rank's experts."""
        hidden, inner = self._hidden, self._inner
        targets = {
            "gate.weight": self.gate_up.weight_target(0, inner, hidden, index),
            "up.weight": self.gate_up.weight_target(inner.size, inner, hidden, index),
            "down.weight": self.down.weight_target(0, hidden, inner, index),
        }
        if self.gate_up_bias is not None and self.down_bias is not None:
            gate, up = self.gate_up_bias.data[index].split(inner.size)
            targets["gate.bias"], targets["up.bias"] = WeightTarget.of(gate, inner), WeightTarget.of(up, inner)
            targets["down.bias"] = WeightTarget.whole(self.down_bias.data[index])
        orders = {
            "gate": self.gate_up.columns_target(0, index),
            "up": self.gate_up.columns_target(inner.size, index),
            "down": self.down.columns_target(0, index),
        }
        return targets | {f"{part}.columns": target for part, target in orders.items() if target is not None}


def _empty(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)
