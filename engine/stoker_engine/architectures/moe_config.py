"""The shape of a mixture of experts (Shazeer et al., 2017): routing and expert sizes.

The routers of all families follow one formula:

    scores   s = softmax(logits) or sigmoid(logits)                           over all experts, float32
    choice   the top k of s + correction bias, within the best groups         (groups: DeepSeek-V2 and V3)
    weights  s of the chosen experts ÷ their p-norm (p = 1: their sum; None: 1) × routed_scaling_factor

A softmax over only the top k logits (Granite, gpt-oss) equals a softmax over all experts with p = 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from stoker_common.errors import ModelError

#: Maximum number of experts of a layer; a config.json with more is rejected.
MOST_EXPERTS: Final = 10_000


@dataclass(frozen=True)
class MoEConfig:
    """One layer's mixture of experts.

    Attributes:
        num_experts: number of routed experts.
        num_experts_per_tok: number of routed experts selected for each token.
        intermediate_size: inner size of one routed expert, a gated MLP.
        bias: whether the routed experts have biases (gpt-oss).
        scoring: how router logits become scores.
        normalize: p of the p-norm that the weights are divided by; None: not normalized.
        router_bias: whether the router's logits have a bias.
        correction_bias: whether a learned load-balancing bias is added to the scores for the selection only.
        num_groups: number of expert groups, of equal size.
        topk_groups: number of best groups, from which the experts of a token are selected.
        group_score: a group's score: "top2": the sum of its two best experts' scores (DeepSeek-V3); "max": the score of
            its best expert (DeepSeek-V2).
        routed_scaling_factor: weights are multiplied by it.
        shared_intermediate_size: total inner size of the shared experts, which process every token; 0: none.
        shared_gate: whether the shared experts' result is weighted by a sigmoid gate (Qwen2-MoE).
    """

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    bias: bool = False
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalize: float | None = 1.0
    router_bias: bool = False
    correction_bias: bool = False
    num_groups: int = 1
    topk_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    routed_scaling_factor: float = 1.0
    shared_intermediate_size: int = 0
    shared_gate: bool = False

    def __post_init__(self) -> None:
        """Check the sizes.

        Raises:
            ModelError: the sizes are inconsistent, or there are too many experts.
        """
        if self.num_experts > MOST_EXPERTS:
            raise ModelError(f"a layer of {self.num_experts} experts; {MOST_EXPERTS} is the maximum")
        if self.num_experts_per_tok > self.num_experts:
            raise ModelError(
                f"{self.num_experts_per_tok} experts per token are more than the {self.num_experts} experts"
            )
        if self.num_experts % self.num_groups or self.topk_groups > self.num_groups:
            raise ModelError(
                f"{self.num_experts} experts cannot be split into {self.num_groups} equal groups "
                f"of which {self.topk_groups} are selected"
            )
        if self.num_experts_per_tok > self.topk_groups * (self.num_experts // self.num_groups):
            raise ModelError(f"{self.topk_groups} groups have fewer than {self.num_experts_per_tok} experts")
        if self.group_score == "top2" and 1 < self.num_groups > self.num_experts // 2:
            raise ModelError(
                f"{self.num_groups} groups of fewer than two experts cannot be ranked by their two best ones"
            )

    def weights(self, hidden_size: int) -> int:
        """Return the number of elements of all matrices of the mixture, including router and shared gate, without
        biases."""
        experts = 3 * self.num_experts * self.intermediate_size * hidden_size
        shared = 3 * self.shared_intermediate_size * hidden_size + (hidden_size if self.shared_gate else 0)
        return self.num_experts * hidden_size + experts + shared
