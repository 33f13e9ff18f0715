"""Mixture of experts: routing, and the chosen experts' gated MLPs.

Each chosen expert computes all its tokens at once, so a step reads the weights of each expert in use once, regardless
of the number of requests:

    token        0 1 2 3          flat choices   t0e2 t0e0 t1e2 t1e3 t2e0 …
    experts      2 2 0 2    ──►   sorted         e0: t0 t2   e1: t3   e2: t0 t1 t3   e3: t1 t2
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
    """Choose experts by router `logits` [tokens, experts]; for the formula see `architectures.moe_config`.

    Args:
        correction_bias: [experts] float32, or None.

    Returns:
        Weights [tokens, k] float32, and expert indices [tokens, k] int64.
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
    """Return a variant of `linear` that computes in float32 also for 16-bit weights: rounding must not decide between
    experts with close scores."""

    def make(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Operation:
        return lambda x: linear(weight.float(), None if bias is None else bias.float())(x.float())

    return make


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Return σ(x) in float32; an element's bits do not depend on its position.

    torch's vectorized loop and its scalar tail use formulas that differ in the last bit, and which elements are in the
    tail depends on the number of tokens. Computing in float64 rounds the difference away.
    """
    return x.double().sigmoid().float()


def _within_best_groups(choice: torch.Tensor, config: MoEConfig) -> torch.Tensor:
    """Return `choice` with -inf in all groups except the best `topk_groups`."""
    grouped = choice.unflatten(-1, (config.num_groups, -1))
    group_scores = grouped.amax(-1) if config.group_score == "max" else grouped.topk(2, dim=-1).values.sum(-1)
    best = group_scores.topk(config.topk_groups, dim=-1).indices
    out = torch.ones_like(group_scores, dtype=torch.bool).scatter_(-1, best, False)
    return grouped.masked_fill(out.unsqueeze(-1), -torch.inf).flatten(-2)  # type: ignore[no-any-return]


def grouped_linear(linear: MakeLinear, weights: torch.Tensor, biases: torch.Tensor | None = None) -> list[Operation]:
    """Return a linear operation for each of `weights` [count, outputs, inner] and `biases` [count, outputs] or None."""
    return [linear(weight, None if biases is None else biases[index]) for index, weight in enumerate(weights)]


def experts(
    gate_up: Sequence[Operation],
    down: Sequence[Operation],
    act_and_mul: Operation,
    on_expert: Callable[[torch.Tensor], None] = lambda tokens: None,
) -> Experts:
    """Return the operation Σ over a token's experts of weight × down(act(gate(x)) × up(x)).

    A token's results are added in float32 in the order of expert indices, whatever the batch. Indices beyond the given
    experts are ignored: other ranks compute those experts.

    Args:
        gate_up: each expert's linear operation [tokens, hidden] → [tokens, 2 × intermediate].
        down: each expert's linear operation [tokens, intermediate] → [tokens, hidden].
        act_and_mul: [tokens, 2 × intermediate] → [tokens, intermediate].
        on_expert: called before an expert's operations with the indices of its tokens, int64.

    Returns:
        Operation on x [tokens, hidden] and the results of `route` → [tokens, hidden] in x's dtype.
    """

    def chosen_experts(x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        order = chosen.flatten().argsort(stable=True)
        tokens = order // chosen.shape[1]
        scales = weights.flatten()[order].unsqueeze(-1)
        # Synchronizes with the device; grouped kernels avoid this.
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
    """Return `experts` for stacked matrices, multiplied by `linear`."""

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


def make_block_experts(
    linear: MakeQuantLinear,
    act_and_mul: Callable[[Activation], Operation],
    packed_linear: MakeQuantLinear | None = None,
) -> MakeBlockExperts:
    """Return `experts` for matrices in blocks, multiplied by `linear`, or `packed_linear` if they are packed."""

    def linears(stack: BlockStack, dtype: torch.dtype) -> list[Operation]:
        biases = [None] * len(stack.blocks) if stack.biases is None else stack.biases
        make = packed_linear if stack.is_packed else linear
        assert make is not None
        return [
            make(blocks, stack.stored, stack.inner, dtype, bias)
            for blocks, bias in zip(stack.blocks, biases, strict=True)
        ]

    return lambda gate_up, down, act, dtype: experts(linears(gate_up, dtype), linears(down, dtype), act_and_mul(act))
