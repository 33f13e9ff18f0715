"""Mixture of experts: the router's choice, and the chosen experts' gated MLPs.

Each expert that was chosen computes all its tokens in one GEMM, so a step costs one pass over the weights of the
experts in use, however many requests it serves:

    token        0 1 2 3          flat choices   t0e2 t0e0 t1e2 t1e3 t2e0 …
    experts      2 2 0 2    ──►   sorted         e0: t0 t2 t3   e2: t0 t1 …   e3: t1 …
                 0 3 3 1                         one pair of GEMMs each
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from stoker_engine.architectures.activation import Activation
from stoker_engine.architectures.moe_config import MoEConfig
from stoker_engine.kernels.bundle import (
    BlockStack,
    Experts,
    MakeBlockExperts,
    MakeExperts,
    MakeLinear,
    MakeQuantLinear,
    Operation,
)
from stoker_engine.parallel.transfer import to_host


def route(
    logits: torch.Tensor, config: MoEConfig, correction_bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses experts by router `logits` [tokens, experts]; the formula is `architectures.moe_config`'s.

    Args:
        correction_bias: [experts] float32, or None.

    Returns:
        weights [tokens, k] float32 and expert numbers [tokens, k] int64.
    """
    scores = sigmoid(logits) if config.scoring == "sigmoid" else logits.float().softmax(-1)
    choice = scores if correction_bias is None else scores + correction_bias
    if config.topk_groups < config.num_groups:
        choice = _within_best_groups(choice, config)
    chosen = choice.topk(config.num_experts_per_tok, dim=-1).indices
    weights = scores.gather(-1, chosen)
    if config.normalize is not None:
        weights = weights / weights.norm(p=config.normalize, dim=-1, keepdim=True).clamp_min(1e-20)
    return weights * config.routed_scaling_factor, chosen


def float32_linear(linear: MakeLinear) -> MakeLinear:
    """Products in float32 of what may have 16 bits: experts whose scores are close must not be chosen by rounding."""

    def make(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Operation:
        return lambda x: linear(weight.float(), None if bias is None else bias.float())(x.float())

    return make


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """σ(x) in float32, the same for a number wherever it stands.

    torch computes vectors of numbers, and those left over at the end, by formulas that differ in the last bit; which
    ones are left over depends on how many tokens there are. In float64 the difference is rounded away.
    """
    return x.double().sigmoid().float()


def _within_best_groups(choice: torch.Tensor, config: MoEConfig) -> torch.Tensor:
    """`choice` with -inf in all groups but the best `topk_groups`."""
    grouped = choice.unflatten(-1, (config.num_groups, -1))
    group_scores = grouped.amax(-1) if config.group_score == "max" else grouped.topk(2, dim=-1).values.sum(-1)
    best = group_scores.topk(config.topk_groups, dim=-1).indices
    out = torch.ones_like(group_scores, dtype=torch.bool).scatter_(-1, best, False)
    return grouped.masked_fill(out.unsqueeze(-1), -torch.inf).flatten(-2)  # type: ignore[no-any-return]


def grouped_linear(linear: MakeLinear, weights: torch.Tensor, biases: torch.Tensor | None = None) -> list[Operation]:
    """The linear operation with each of `weights` [count, outputs, inner] and `biases` [count, outputs] or None."""
    return [linear(weight, None if biases is None else biases[index]) for index, weight in enumerate(weights)]


def experts(
    gate_up: Sequence[Operation],
    down: Sequence[Operation],
    act_and_mul: Operation,
    on_expert: Callable[[torch.Tensor], None] = lambda tokens: None,
) -> Experts:
    """Σ over a token's experts of weight × down(act(gate(x)) × up(x)).

    A token's results are added in float32, in the order of the experts' numbers: what else is in the batch
    does not change them. Numbers beyond those of the experts given are others', which are computed elsewhere.

    Args:
        gate_up: each expert's linear operation [tokens, hidden] → [tokens, 2 × intermediate].
        down: each expert's linear operation [tokens, intermediate] → [tokens, hidden].
        act_and_mul: [tokens, 2 × intermediate] → [tokens, intermediate].
        on_expert: is called before an expert's operations with the numbers of its tokens, int64.

    Returns:
        What gives [tokens, hidden] in x's dtype from x [tokens, hidden] and `route`'s two.
    """

    def chosen_experts(x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        order = chosen.flatten().argsort(stable=True)
        tokens = order // chosen.shape[1]
        scales = weights.flatten()[order].unsqueeze(-1)
        # On a device this waits for it: the one place in a forward pass, which a grouped kernel does without.
        counts = to_host(chosen.flatten().bincount(minlength=len(gate_up)))
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        end = 0
        for expert, count in enumerate(counts[: len(gate_up)]):
            if not count:
                continue
            start, end = end, end + count
            rows = tokens[start:end]
            on_expert(rows)
            inner = act_and_mul(gate_up[expert](x[rows]))
            out.index_add_(0, rows, down[expert](inner) * scales[start:end])
        return out.to(x.dtype)

    return chosen_experts


def make_experts(linear: MakeLinear, act_and_mul: Callable[[Activation], Operation]) -> MakeExperts:
    """`experts` with stacked matrices, multiplied by `linear`."""

    def make(
        gate_up: torch.Tensor,
        down: torch.Tensor,
        act: Activation,
        gate_up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
    ) -> Experts:
        gate_ups, downs = grouped_linear(linear, gate_up, gate_up_bias), grouped_linear(linear, down, down_bias)
        return experts(gate_ups, downs, act_and_mul(act))

    return make


def make_block_experts(linear: MakeQuantLinear, act_and_mul: Callable[[Activation], Operation]) -> MakeBlockExperts:
    """`experts` with matrices in blocks, multiplied by `linear`."""

    def linears(stack: BlockStack, dtype: torch.dtype) -> list[Operation]:
        biases = [None] * len(stack.blocks) if stack.biases is None else stack.biases
        return [
            linear(blocks, stack.stored, stack.inner, dtype, bias)
            for blocks, bias in zip(stack.blocks, biases, strict=True)
        ]

    return lambda gate_up, down, act, dtype: experts(linears(gate_up, dtype), linears(down, dtype), act_and_mul(act))
