"""Bundle of reference implementations by torch's operators: they run on every device, and define correct results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import torch

from stoker_engine.architectures.stored_formats import StoredFormat
from stoker_engine.kernels.activation import act_and_mul, activation
from stoker_engine.kernels.argmax import argmax
from stoker_engine.kernels.batched_linear import batched_linear
from stoker_engine.kernels.blocks import block_linear, block_rows
from stoker_engine.kernels.bundle import Fp8Kernels, Kernels, Operation, QuantizedRows
from stoker_engine.kernels.concat_linear import concat_linear
from stoker_engine.kernels.fp8_linear import quantize_rows
from stoker_engine.kernels.fp8_panels import fp8_panels
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


def _then_quantized(make: Callable[..., Operation]) -> Callable[..., Callable[[torch.Tensor], QuantizedRows]]:
    """Return the factory of an operation followed by `quantize_rows`."""

    def made(*constants: object) -> Callable[[torch.Tensor], QuantizedRows]:
        compute = make(*constants)
        return lambda x: quantize_rows(compute(x))

    return made


def _add_rms_norm_rows(
    weight: torch.Tensor, eps: float
) -> Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, QuantizedRows]]:
    sum_and_norm = REFERENCE.add_rms_norm(weight, eps)

    def compute(x: torch.Tensor, added: torch.Tensor) -> tuple[torch.Tensor, QuantizedRows]:
        total, normed = sum_and_norm(x, added)
        return total, quantize_rows(normed)

    return compute


#: The same with products in FP8.
REFERENCE_FP8: Final = replace(
    REFERENCE,
    block_panels=fp8_panels(quantize_rows),
    fp8=Fp8Kernels(
        quantize=quantize_rows,
        rms_norm=_then_quantized(REFERENCE.rms_norm),
        add_rms_norm=_add_rms_norm_rows,
        act_and_mul=_then_quantized(act_and_mul),
        activation=_then_quantized(activation),
    ),
)
