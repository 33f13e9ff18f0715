"""The shape of a mixture of experts (Shazeer et al., 2017): how tokens choose experts, and how large these are.

All families' routers are one formula with other constants:

    scores   s = softmax(logits) or sigmoid(logits)                           over all experts, float32
    choice   the top k of s + correction bias, within the best groups         (groups: DeepSeek-V2 and V3)
    weights  s at the chosen ÷ their p-norm (p = 1: their sum, or undivided) × routed_scaling_factor

Taking the top k logits first and their softmax then (Granite, gpt-oss) is the same as p = 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from stoker_common.errors import ModelError

#: More are taken for a damaged file: each has weights with names of its own.
MOST_EXPERTS: Final = 10_000


@dataclass(frozen=True)
class MoEConfig:
    """One layer's mixture of experts.

    Attributes:
        num_experts: routed experts.
        num_experts_per_tok: experts that one token goes to.
        intermediate_size: of one routed expert, a gated MLP.
        bias: whether the routed experts have biases (gpt-oss).
        scoring: how router logits become scores.
        normalize: p of the norm that weights are divided by; None leaves them.
        router_bias: whether the router's logits have one.
        correction_bias: whether a bias, learned for balance, joins the scores for the choice only.
        num_groups: groups of experts, of equal size.
        topk_groups: how many groups a token may choose from.
        group_score: a group's score: the sum of its two best experts' (DeepSeek-V3), or its best one (DeepSeek-V2).
        routed_scaling_factor: weights are multiplied by it.
        shared_intermediate_size: of the shared experts together, which see every token; 0: there are none.
        shared_gate: whether the shared experts' result is weighted by a sigmoid of its own (Qwen2-MoE).
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
        """Raises:
        ModelError: the numbers do not fit together.
        """
        if self.num_experts > MOST_EXPERTS:
            raise ModelError(f"a layer of {self.num_experts} experts; {MOST_EXPERTS} is the most")
        if self.num_experts_per_tok > self.num_experts:
            raise ModelError(f"a token goes to {self.num_experts_per_tok} experts, and there are {self.num_experts}")
        if self.num_experts % self.num_groups or self.topk_groups > self.num_groups:
            raise ModelError(
                f"{self.num_experts} experts cannot be {self.num_groups} equal groups, "
                f"{self.topk_groups} of them chosen"
            )
        if self.num_experts_per_tok > self.topk_groups * (self.num_experts // self.num_groups):
            raise ModelError(f"{self.topk_groups} groups have less than {self.num_experts_per_tok} experts")
        if self.group_score == "top2" and 1 < self.num_groups > self.num_experts // 2:
            raise ModelError(f"{self.num_groups} groups of less than two experts cannot be ranked by their two best")

    def weights(self, hidden_size: int) -> int:
        """How many numbers the layer's matrices hold, router included, biases not."""
        experts = 3 * self.num_experts * self.intermediate_size * hidden_size
        shared = 3 * self.shared_intermediate_size * hidden_size + (hidden_size if self.shared_gate else 0)
        return self.num_experts * hidden_size + experts + shared
