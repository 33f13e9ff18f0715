"""The router's choice by Triton, compared with torch in float64; among equal scores the lowest numbers win."""

from __future__ import annotations

import dataclasses
import random
from typing import Any, Literal

import pytest
import torch

from stoker_engine.architectures.moe_config import MoEConfig
from stoker_engine.kernels.triton.bundle import TRITON

#: Mixtral, GPT-OSS, DBRX, DeepSeek-V2, DeepSeek-V3, and extreme cases.
CONFIGS = {
    "softmax": MoEConfig(8, 2, 1),
    "undivided": MoEConfig(17, 8, 1, normalize=None, routed_scaling_factor=2.5),
    "by 2-norm": MoEConfig(16, 4, 1, normalize=2.0),
    "by another norm": MoEConfig(16, 4, 1, normalize=3.0),
    "best of a group": MoEConfig(15, 4, 1, normalize=None, num_groups=5, topk_groups=2, routed_scaling_factor=16.0),
    "sigmoid in groups": MoEConfig(
        256, 8, 1, scoring="sigmoid", correction_bias=True, num_groups=8, topk_groups=4, group_score="top2",
        routed_scaling_factor=2.5,
    ),
    "sigmoid": MoEConfig(5, 3, 1, scoring="sigmoid", correction_bias=True),
    "all groups": MoEConfig(12, 5, 1, num_groups=4, topk_groups=4),
    "all of a group": MoEConfig(6, 2, 1, num_groups=3, topk_groups=1, group_score="top2"),
    "one": MoEConfig(1, 1, 1),
    "all": MoEConfig(11, 11, 1),
    "many": MoEConfig(1000, 3, 1),
}  # fmt: skip


def in_float64(
    logits: torch.Tensor, config: MoEConfig, correction: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Route as `architectures.moe_config` defines; among equal scores choose the lowest numbers."""
    scores = logits.double().sigmoid() if config.scoring == "sigmoid" else logits.double().softmax(-1)
    choice = scores if correction is None else scores + correction
    grouped = choice.unflatten(-1, (config.num_groups, -1))
    best = grouped.sort(dim=-1, descending=True).values
    of_group = best[..., 0] if config.group_score == "max" else best[..., :2].sum(-1)
    indices = of_group.sort(dim=-1, descending=True, stable=True).indices.argsort(-1)
    choice = grouped.where((indices < config.topk_groups).unsqueeze(-1), -torch.inf).flatten(-2)
    chosen = choice.sort(dim=-1, descending=True, stable=True).indices[:, : config.num_experts_per_tok]
    weights = scores.gather(-1, chosen)
    if config.normalize is not None:
        weights = weights / torch.linalg.vector_norm(weights, ord=config.normalize, dim=-1, keepdim=True)
    return weights * config.routed_scaling_factor, chosen


def check(logits: torch.Tensor, config: MoEConfig, correction: torch.Tensor | None) -> None:
    weights, chosen = TRITON.route(config, correction)(logits)
    expected, experts = in_float64(logits, config, correction)
    assert weights.dtype == torch.float32 and chosen.dtype == torch.int64
    assert torch.equal(chosen, experts)
    torch.testing.assert_close(weights.double(), expected, rtol=2e-6, atol=1e-12)


def correction_of(config: MoEConfig, generator: torch.Generator) -> torch.Tensor | None:
    return torch.randn(config.num_experts, generator=generator) * 0.3 if config.correction_bias else None


@pytest.mark.parametrize("name", CONFIGS)
def test_routing_equals_float64(name: str) -> None:
    config, generator = CONFIGS[name], torch.Generator().manual_seed(0)
    correction = correction_of(config, generator)
    logits = torch.randn(4, config.num_experts + 3, generator=generator).mul(2)
    for each in (logits[:, 2:-1], logits[:1, 1:-2], logits[:0, 3:], logits.T.contiguous().T[:, 3:]):
        check(each, config, correction)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "by another norm"])
def test_lowest_numbers_win_among_equal_scores(name: str) -> None:
    config = dataclasses.replace(CONFIGS[name], correction_bias=False)
    generator = torch.Generator().manual_seed(1)
    logits = torch.randint(-1, 2, (8, config.num_experts), generator=generator).float()
    logits[0] = 0.0
    check(logits.bfloat16(), config, None)


@pytest.mark.parametrize("name", ["softmax", "best of a group", "sigmoid in groups", "by 2-norm"])
def test_nan_affects_only_its_row(name: str) -> None:
    """NaN rows get valid experts, none of them twice."""
    config, generator = CONFIGS[name], torch.Generator().manual_seed(2)
    correction = correction_of(config, generator)
    logits = torch.randn(6, config.num_experts, generator=generator)
    route = TRITON.route(config, correction)
    weights, chosen = route(logits)
    bad = logits.clone()
    bad[1], bad[2, 3], bad[3, 0], bad[4] = torch.nan, torch.nan, torch.inf, -torch.inf
    bad_weights, bad_chosen = route(bad)
    for row in bad_chosen.tolist():
        assert len(set(row)) == config.num_experts_per_tok and set(row) <= set(range(config.num_experts))
    assert torch.equal(bad_weights[[0, 5]], weights[[0, 5]]) and torch.equal(bad_chosen[[0, 5]], chosen[[0, 5]])
    assert bad_weights[1].isnan().all()
    if config.scoring == "softmax":
        assert bad_weights[1:5].isnan().all()
    else:
        assert bad_weights[2].isnan().any() and not bad_weights[3].isnan().any()


def test_bits_do_not_depend_on_the_batch() -> None:
    generator = torch.Generator().manual_seed(3)
    for name in ("softmax", "by 2-norm", "sigmoid in groups", "many"):
        config = CONFIGS[name]
        correction = correction_of(config, generator)
        logits = torch.randn(4, config.num_experts, generator=generator)
        route = TRITON.route(config, correction)
        weights, chosen = route(logits)
        for row in range(4):
            alone, experts = route(logits[row : row + 1])
            assert torch.equal(alone[0], weights[row]) and torch.equal(experts[0], chosen[row])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_random_configs_equal_float64(seed: int) -> None:
    dice, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    groups = dice.choice([1, 1, 2, 3, 8])
    size = dice.randint(2, 9) if groups > 1 else dice.randint(1, 130)
    top_groups = dice.randint(1, groups)
    scoring: Literal["softmax", "sigmoid"] = dice.choice(["softmax", "sigmoid"])
    more: dict[str, Any] = {
        "normalize": dice.choice([None, 1.0, 2.0]),
        "correction_bias": dice.random() < 0.5,
        "group_score": dice.choice(["max", "top2"]) if groups > 1 else "max",
        "routed_scaling_factor": dice.choice([1.0, 2.5]),
    }
    config = MoEConfig(
        groups * size, dice.randint(1, min(8, top_groups * size)), 1, scoring=scoring, num_groups=groups,
        topk_groups=top_groups, **more,
    )  # fmt: skip
    tokens, dtype = dice.choice([0, 1, 2, 33]), dice.choice([torch.float32, torch.bfloat16])
    logits = torch.randn(tokens, config.num_experts, generator=generator).to(dtype)
    check(logits, config, correction_of(config, generator))
