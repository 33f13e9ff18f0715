"""Bundle of reference implementations by torch's operators: they run on every device, and define correct results."""

from __future__ import annotations

from typing import Final

import torch

from stoker_engine.architectures.stored_formats import StoredFormat
from stoker_engine.kernels.activation import act_and_mul, activation
from stoker_engine.kernels.argmax import argmax
from stoker_engine.kernels.batched_linear import batched_linear
from stoker_engine.kernels.blocks import block_linear, block_rows
from stoker_engine.kernels.bundle import Kernels, Operation
from stoker_engine.kernels.concat_linear import concat_linear
from stoker_engine.kernels.layer_norm import layer_norm
from stoker_engine.kernels.linear import linear
from stoker_engine.kernels.logprobs import logprobs
from stoker_engine.kernels.moe import float32_linear, make_block_experts, make_experts, route
from stoker_engine.kernels.rms_norm import after_sum, rms_norm
from stoker_engine.kernels.rotary import apply_rotary, concat_rotated, cos_sin
from stoker_engine.kernels.select_token import select_token
from stoker_engine.kernels.token_mask import keep_allowed


def _linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Operation:
    return lambda x: linear(x, weight, bias)


def _quant_linear(
    blocks: torch.Tensor, stored: StoredFormat, inner: int, dtype: torch.dtype, bias: torch.Tensor | None = None
) -> Operation:
    return lambda x: block_linear(x, blocks, stored, inner, bias)


REFERENCE: Final = Kernels(
    linear=_linear,
    batched_linear=lambda weight: lambda x: batched_linear(x, weight),
    concat_linear=concat_linear,
    experts=make_experts(_linear, act_and_mul),
    float32_linear=float32_linear(_linear),
    route=lambda config, correction_bias: lambda logits: route(logits, config, correction_bias),
    quant_linear=_quant_linear,
    block_experts=make_block_experts(_quant_linear, act_and_mul),
    block_rows=block_rows,
    rms_norm=lambda weight, eps: lambda x: rms_norm(x, weight, eps),
    add_rms_norm=lambda weight, eps: after_sum(lambda x: rms_norm(x, weight, eps)),
    layer_norm=lambda weight, bias, eps: lambda x: layer_norm(x, weight, bias, eps),
    activation=activation,
    act_and_mul=act_and_mul,
    apply_rotary=apply_rotary,
    concat_rotated=concat_rotated,
    cos_sin=cos_sin,
    argmax=argmax,
    keep_allowed=keep_allowed,
    select_token=select_token,
    logprobs=logprobs,
)
