"""Bundle of the Triton kernels; operations without a kernel use torch's operators."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from stoker_engine.kernels.bundle import Fp8Kernels, GroupedLora
from stoker_engine.kernels.fp8_panels import fp8_panels_or
from stoker_engine.kernels.reference import REFERENCE
from stoker_engine.kernels.triton.gemm.linear import batched_linear, float32_linear
from stoker_engine.kernels.triton.gemm.packed_linear import block_panels
from stoker_engine.kernels.triton.gemm.quant_gemm import quant_linear
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
from stoker_engine.kernels.triton.quant.packed_layout import fit
from stoker_engine.kernels.triton.sampling.argmax import argmax
from stoker_engine.kernels.triton.sampling.logprobs import logprobs
from stoker_engine.kernels.triton.sampling.select_token import select_token
from stoker_engine.kernels.triton.sampling.token_mask import keep_allowed

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
    block_panels=block_panels(is_fixed=False),
    lora=GroupedLora(group, lora_shrink, lora_expand, tile_outputs),
)

#: The same on GPUs with FP8 tensor cores, in bfloat16.
TRITON_FP8: Final = replace(
    TRITON,
    block_panels=replace(fp8_panels_or(block_panels(is_fixed=False), quantize_rows), fit_stack=fit),
    fp8=Fp8Kernels(
        quantize=quantize_rows,
        rms_norm=lambda weight, eps: lambda x: rms_norm_rows(x, weight, eps),
        add_rms_norm=lambda weight, eps: lambda x, added: add_rms_norm_rows(x, added, weight, eps),
        act_and_mul=act_and_mul_rows,
        activation=activation_rows,
    ),
)
