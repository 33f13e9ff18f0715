"""Readers of mixture-of-experts configs; see `architectures.moe_config` for the terms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from stoker_engine.architectures.config_fields import Fields
from stoker_engine.architectures.decoder_config import LayerConfig
from stoker_engine.architectures.moe_config import MoEConfig


def sparse(
    layers: tuple[LayerConfig, ...], moe: MoEConfig, is_sparse: Callable[[int], bool]
) -> tuple[LayerConfig, ...]:
    """Return `layers`, with `moe` instead of the MLP in layers for whose index `is_sparse` is true."""
    return tuple(replace(layer, moe=moe) if is_sparse(index) else layer for index, layer in enumerate(layers))


def sigmoid_moe(c: Fields) -> MoEConfig:
    """Return a mixture like DeepSeek-V3's: sigmoid scores, a correction bias, groups, shared experts."""
    groups = c.optional_integer("n_group") or 1
    return MoEConfig(
        num_experts=c.integer("n_routed_experts"),
        num_experts_per_tok=c.integer("num_experts_per_tok"),
        intermediate_size=c.integer("moe_intermediate_size"),
        scoring="sigmoid",
        normalize=1.0 if c.flag("norm_topk_prob") else None,
        correction_bias=True,
        num_groups=groups,
        topk_groups=c.optional_integer("topk_group") or groups,
        group_score="top2",
        routed_scaling_factor=c.number("routed_scaling_factor"),
        shared_intermediate_size=(c.optional_integer("n_shared_experts") or 0) * c.integer("moe_intermediate_size"),
    )


def softmax_moe(c: Fields, experts: str = "num_experts", size: str = "intermediate_size") -> MoEConfig:
    """Return a mixture with softmax scores.

    Args:
        experts: field with the number of experts.
        size: field with the inner size of an expert.
    """
    return MoEConfig(
        num_experts=c.integer(experts),
        num_experts_per_tok=c.integer("num_experts_per_tok"),
        intermediate_size=c.integer(size),
        normalize=1.0 if c.flag("norm_topk_prob") else None,
    )


def every_layer(index: int) -> bool:
    """Return True: an `is_sparse` for models whose layers are all mixtures."""
    return True
