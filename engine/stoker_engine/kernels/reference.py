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
from stoker_engine.kernels.bundle import Kernels, Operation, QuantizedRows, QuantizingKernels, RowFormat
from stoker_engine.kernels.concat_linear import concat_linear
from stoker_engine.kernels.layer_norm import layer_norm
from stoker_engine.kernels.linear import linear
from stoker_engine.kernels.logprobs import logprobs
from stoker_engine.kernels.moe import float32_linear, make_block_experts, make_experts, route
from stoker_engine.kernels.rms_norm import after_sum, rms_norm
from stoker_engine.kernels.rotary import apply_rotary, concat_rotated, cos_sin
from stoker_engine.kernels.select_token import select_token
from stoker_engine.kernels.token_mask import keep_allowed
from stoker_engine.kernels.w8a8_linear import MultiplyW8A8, fp8_group_linear, fp8_linear, int8_linear, quantize_rows
from stoker_engine.kernels.w8a8_panels import w8a8_panels


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


def _quantizing(format: RowFormat) -> QuantizingKernels:
    def quantize(x: torch.Tensor) -> QuantizedRows:
        return quantize_rows(x, format)

    def then_quantized(make: Callable[..., Operation]) -> Callable[..., Callable[[torch.Tensor], QuantizedRows]]:
        """Return the factory of an operation followed by `quantize`."""

        def made(*constants: object) -> Callable[[torch.Tensor], QuantizedRows]:
            compute = make(*constants)
            return lambda x: quantize(compute(x))

        return made

    def add_rms_norm(
        weight: torch.Tensor, eps: float
    ) -> Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, QuantizedRows]]:
        sum_and_norm = REFERENCE.add_rms_norm(weight, eps)

        def compute(x: torch.Tensor, added: torch.Tensor) -> tuple[torch.Tensor, QuantizedRows]:
            total, normed = sum_and_norm(x, added)
            return total, quantize(normed)

        return compute

    return QuantizingKernels(
        quantize=quantize,
        rms_norm=then_quantized(REFERENCE.rms_norm),
        add_rms_norm=add_rms_norm,
        act_and_mul=then_quantized(act_and_mul),
        activation=then_quantized(activation),
    )


_QUANTIZING: Final = {format: _quantizing(format) for format in RowFormat}
_MULTIPLY: Final[dict[RowFormat, MultiplyW8A8]] = {
    RowFormat.FP8_ROWS: fp8_linear,
    RowFormat.FP8_GROUPS: fp8_group_linear,
    RowFormat.INT8_ROWS: int8_linear,
}


_PANELS: Final = w8a8_panels(_QUANTIZING, _MULTIPLY)

#: The same with quantized activations, where matrices permit it.
REFERENCE_W8A8: Final = replace(
    REFERENCE,
    block_panels=_PANELS,
    block_experts=make_block_experts(_quant_linear, act_and_mul, _PANELS.linear),
    quantizing=_QUANTIZING,
)
