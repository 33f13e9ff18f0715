"""Routing (`kernels/moe.py` defines it). One program computes a token.

Scores form a tile of groups × experts of a group. Each has an integer key that orders by score first, then by
descending expert index. Keys are unique, and the best expert has the largest key: of equal scores the lowest expert
indices are chosen (torch does not specify which).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import torch
import triton
import triton.language as tl

from stoker_engine.architectures.moe_config import MoEConfig
from stoker_engine.kernels import moe as defined
from stoker_engine.kernels.bundle import Route
from stoker_engine.kernels.triton.common.arithmetic import widened
from stoker_engine.kernels.triton.common.gpu_target import GpuTarget
from stoker_engine.kernels.triton.common.kernel_variant import KernelVariant
from stoker_engine.kernels.triton.common.operation import operation
from stoker_engine.kernels.triton.common.rows import warps_for

#: Smaller than every score's key.
_OUT: Final = tl.constexpr(-(2**63))


@triton.jit
def _key_of(score, number):  # type: ignore[no-untyped-def]
    """Return sort keys of scores and 31-bit indices; NaN is the largest, as in torch."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    ordered = tl.where(score == score, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - number).to(tl.int64)


@triton.jit
def _score_of(key):  # type: ignore[no-untyped-def]
    ordered = (key >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _route(  # type: ignore[no-untyped-def]
    logits,
    correction,
    weights,
    chosen,
    scaling,
    logits_row: tl.int64,
    GROUPS: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_PADDED: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BY_TWO: tl.constexpr,
    TOP: tl.constexpr,
    TOP_PADDED: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, GROUPS_PADDED), tl.arange(0, SIZE_PADDED)
    number = group[:, None] * SIZE + member[None, :]
    is_expert = (group < GROUPS)[:, None] & (member < SIZE)[None, :]
    logit = widened(tl.load(logits + token * logits_row + number, mask=is_expert, other=float("-inf")))
    if SIGMOID:
        scores = tl.sigmoid(logit)
    else:
        scores = tl.exp(logit - tl.max(tl.max(logit, 1), 0))
        scores = tl.div_rn(scores, tl.zeros_like(scores) + tl.sum(tl.sum(scores, 1), 0))
    choice = scores
    if correction is not None:
        choice += tl.load(correction + number, mask=is_expert, other=0.0)
    keys = tl.where(is_expert, _key_of(choice, number), _OUT)

    if TOP_GROUPS < GROUPS:
        best = tl.max(keys, 1)
        group_score = _score_of(best)
        if BY_TWO:
            group_score += _score_of(tl.max(tl.where(keys == best[:, None], _OUT, keys), 1))
        group_keys = tl.where(group < GROUPS, _key_of(group_score, group), _OUT)
        for _ in tl.range(TOP_GROUPS):
            group_keys = tl.where(group_keys == tl.max(group_keys, 0), _OUT, group_keys)
        # The groups whose keys were removed are the chosen ones.
        keys = tl.where((group_keys == _OUT)[:, None], keys, _OUT)

    choice_index = tl.arange(0, TOP_PADDED)
    experts = tl.zeros([TOP_PADDED], tl.int64)
    weight = tl.zeros([TOP_PADDED], tl.float32)
    for index in tl.range(TOP):
        best_key = tl.max(tl.max(keys, 1), 0)
        is_best = keys == best_key
        score = tl.sum(tl.sum(tl.where(is_best, scores, 0.0), 1), 0)
        experts = tl.where(choice_index == index, 0x7FFFFFFF - (best_key & 0x7FFFFFFF), experts)
        weight = tl.where(choice_index == index, score, weight)
        keys = tl.where(is_best, _OUT, keys)
    if NORM > 0:
        size = tl.sum(weight, 0) if NORM == 1 else tl.sqrt_rn(tl.sum(weight * weight, 0))
        weight = tl.div_rn(weight, tl.zeros_like(weight) + tl.where(size < 1e-20, 1e-20, size))
    is_choice = choice_index < TOP
    tl.store(weights + token * TOP + choice_index, weight * scaling, mask=is_choice)
    tl.store(chosen + token * TOP + choice_index, experts, mask=is_choice)


def _constants(
    experts: int, top: int, groups: int, top_groups: int, by_two: bool, is_sigmoid: bool, norm: int
) -> dict[str, Any]:
    if top_groups == groups:
        groups = top_groups = 1
    size = experts // groups
    return {
        "GROUPS": groups,
        "GROUPS_PADDED": triton.next_power_of_2(groups),
        "SIZE": size,
        "SIZE_PADDED": triton.next_power_of_2(size),
        "TOP_GROUPS": top_groups,
        "BY_TWO": by_two,
        "TOP": top,
        "TOP_PADDED": triton.next_power_of_2(top),
        "SIGMOID": is_sigmoid,
        "NORM": norm,
    }


def _warps(constants: dict[str, Any]) -> int:
    return warps_for(constants["GROUPS_PADDED"] * constants["SIZE_PADDED"])


@operation("stoker::route")
def _run(
    logits: torch.Tensor,
    correction_bias: torch.Tensor | None,
    top: int,
    groups: int,
    top_groups: int,
    by_two: bool,
    is_sigmoid: bool,
    norm: int,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, experts = logits.shape
    weights = torch.empty((tokens, top), dtype=torch.float32, device=logits.device)
    chosen = torch.empty((tokens, top), dtype=torch.int64, device=logits.device)
    if tokens:
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        constants = _constants(experts, top, groups, top_groups, by_two, is_sigmoid, norm)
        _route[(tokens,)](
            logits,
            correction_bias,
            weights,
            chosen,
            scaling,
            logits.stride(0),
            **constants,
            num_warps=_warps(constants),
        )
    return weights, chosen


@_run.register_fake
def _(
    logits: torch.Tensor,
    correction_bias: torch.Tensor | None,
    top: int,
    groups: int,
    top_groups: int,
    by_two: bool,
    is_sigmoid: bool,
    norm: int,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    shape, device = (len(logits), top), logits.device
    weights = torch.empty(shape, dtype=torch.float32, device=device)
    return weights, torch.empty(shape, dtype=torch.int64, device=device)


def route(config: MoEConfig, correction_bias: torch.Tensor | None = None) -> Route:
    """See `kernels.moe.route`. For p-norms other than 1 and 2 (in no known model) returns the reference."""
    if config.normalize not in (None, 1, 2):
        return partial(defined.route, config=config, correction_bias=correction_bias)
    return lambda logits: _run(
        logits,
        correction_bias,
        config.num_experts_per_tok,
        config.num_groups,
        config.topk_groups,
        config.group_score == "top2",
        config.scoring == "sigmoid",
        int(config.normalize or 0),
        float(config.routed_scaling_factor),
    )


def kernel_variants(gpu: GpuTarget) -> Iterator[KernelVariant]:
    """See `attention.decode.kernel_variants`."""
    for name, sizes, has_correction in (
        ("8, top 2", (8, 2, 1, 1, False, False, 1), False),
        ("16, by 2-norm", (16, 4, 1, 1, False, False, 2), False),
        ("512, top 10", (512, 10, 1, 1, False, False, 1), False),
        ("in groups", (256, 8, 8, 4, True, True, 1), True),
        ("in odd groups", (160, 6, 8, 3, False, False, 0), False),
        ("as many as there may be", (10_000, 100, 1, 1, False, True, 1), True),
    ):
        constants = _constants(*sizes)
        pointers = dict.fromkeys(("logits", "weights"), "fp32") | {"chosen": "i64"}
        if has_correction:
            pointers["correction"] = "fp32"
        else:
            constants["correction"] = None
        yield KernelVariant.of(f"route {name}", _route, pointers, {"scaling": "fp32"}, constants, _warps(constants))
