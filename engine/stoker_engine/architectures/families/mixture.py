"""What mixtures of experts have in common; the router's kind is stated in `architectures.moe_config`'s terms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from stoker_engine.architectures.config_fields import Fields
from stoker_engine.architectures.decoder_config import LayerConfig
from stoker_engine.architectures.moe_config import MoEConfig


def sparse(
    layers: tuple[LayerConfig, ...], moe: MoEConfig, is_sparse: Callable[[int], bool]
) -> tuple[LayerConfig, ...]:
    """`layers`, with `moe` in the MLP's place where `is_sparse` says so of a layer's index."""
    return tuple(replace(layer, moe=moe) if is_sparse(index) else layer for index, layer in enumerate(layers))


def sigmoid_moe(c: Fields) -> MoEConfig:
    """DeepSeek-V3's mixture: sigmoid scores, a correction bias, groups, shared experts."""
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
    """A mixture with softmax scores; `experts` is the field that counts them, `size` that of the inner size of each."""
    return MoEConfig(
        num_experts=c.integer(experts),
        num_experts_per_tok=c.integer("num_experts_per_tok"),
        intermediate_size=c.integer(size),
        normalize=1.0 if c.flag("norm_topk_prob") else None,
    )


def every_layer(index: int) -> bool:
    """For `sparse`: all layers are."""
    return True
