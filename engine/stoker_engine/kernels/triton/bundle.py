"""Bundle of the Triton kernels; operations without a kernel use torch's operators."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from stoker_engine.kernels.bundle import BlockPanels, GroupedLora, QuantizingKernels, RowFormat
from stoker_engine.kernels.reference import REFERENCE
from stoker_engine.kernels.triton.gemm.int8_linear import int8_linear
from stoker_engine.kernels.triton.gemm.linear import batched_linear, float32_linear
from stoker_engine.kernels.triton.gemm.packed_linear import block_panels
from stoker_engine.kernels.triton.gemm.quant_gemm import quant_linear
from stoker_engine.kernels.triton.gemm.w8a8_gemm import w8a8_gemm
from stoker_engine.kernels.triton.lora.lora_expand import lora_expand
from stoker_engine.kernels.triton.lora.lora_shrink import lora_shrink
from stoker_engine.kernels.triton.lora.tiles import group, tile_outputs
from stoker_engine.kernels.triton.moe.experts import block_experts_with, experts
from stoker_engine.kernels.triton.moe.route import route
from stoker_engine.kernels.triton.ops.activation import act_and_mul, activation
from stoker_engine.kernels.triton.ops.concat_rotated import concat_rotated
from stoker_engine.kernels.triton.ops.layer_norm import layer_norm
from stoker_engine.kernels.triton.ops.quantize_rows import act_and_mul_rows, activation_rows, quantize_rows
from stoker_engine.kernels.triton.ops.rms_norm import add_rms_norm, add_rms_norm_rows, rms_norm, rms_norm_rows
from stoker_engine.kernels.triton.ops.rotary import apply_rotary
from stoker_engine.kernels.triton.sampling.argmax import argmax
from stoker_engine.kernels.triton.sampling.logprobs import logprobs
from stoker_engine.kernels.triton.sampling.select_token import select_token
from stoker_engine.kernels.triton.sampling.token_mask import keep_allowed
from stoker_engine.kernels.w8a8_linear import MultiplyW8A8, fp8_linear
from stoker_engine.kernels.w8a8_panels import w8a8_panels

_MULTIPLY: Final[dict[RowFormat, MultiplyW8A8]] = {
    RowFormat.FP8_ROWS: fp8_linear,
    RowFormat.FP8_GROUPS: w8a8_gemm,
    RowFormat.INT8_ROWS: int8_linear,
}


def _quantizing(format: RowFormat) -> QuantizingKernels:
    return QuantizingKernels(
        quantize=lambda x: quantize_rows(x, format),
        rms_norm=lambda weight, eps: lambda x: rms_norm_rows(x, weight, eps, format),
        add_rms_norm=lambda weight, eps: lambda x, added: add_rms_norm_rows(x, added, weight, eps, format),
        act_and_mul=lambda act: act_and_mul_rows(act, format),
        activation=lambda act: activation_rows(act, format),
    )


_QUANTIZING: Final = {format: _quantizing(format) for format in RowFormat}
#: Formats of activations for which all GPUs have tensor cores.
INT8: Final = {RowFormat.INT8_ROWS: _QUANTIZING[RowFormat.INT8_ROWS]}


def panels(quantizing: dict[RowFormat, QuantizingKernels], is_fixed: bool) -> BlockPanels:
    """Return the operations on packed matrices.

    Args:
        quantizing: operations for the formats to which activations may be quantized.
        is_fixed: whether a row's bits must not depend on the number of rows.
    """
    multiply = {format: w8a8_gemm if is_fixed else _MULTIPLY[format] for format in quantizing}
    return w8a8_panels(quantizing, multiply, block_panels(is_fixed))


TRITON: Final = replace(
    REFERENCE,
    float32_linear=float32_linear,
    batched_linear=batched_linear,
    experts=experts,
    block_experts=block_experts_with(quant_linear),
    route=route,
    quant_linear=quant_linear,
    rms_norm=lambda weight, eps: lambda x: rms_norm(x, weight, eps),
    add_rms_norm=lambda weight, eps: lambda x, added: add_rms_norm(x, added, weight, eps),
    layer_norm=lambda weight, bias, eps: lambda x: layer_norm(x, weight, bias, eps),
    activation=activation,
    act_and_mul=act_and_mul,
    apply_rotary=apply_rotary,
    concat_rotated=concat_rotated,
    argmax=argmax,
    keep_allowed=keep_allowed,
    select_token=select_token,
    logprobs=logprobs,
    block_panels=panels(INT8, is_fixed=False),
    quantizing=INT8,
    lora=GroupedLora(group, lora_shrink, lora_expand, tile_outputs),
)

#: The same on GPUs with FP8 tensor cores, in bfloat16.
TRITON_FP8: Final = replace(TRITON, block_panels=panels(_QUANTIZING, is_fixed=False), quantizing=_QUANTIZING)
