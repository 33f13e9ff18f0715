"""Bundle of the CPU kernels; operations without a kernel use the reference implementation."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

from stoker_engine.architectures.activation import Activation, ClampedSwiGLU
from stoker_engine.kernels.batched_linear import by_head
from stoker_engine.kernels.bundle import Kernels, Operation
from stoker_engine.kernels.cpu import blocks
from stoker_engine.kernels.cpu.activation import activation, clamped_swiglu, kind_of
from stoker_engine.kernels.cpu.argmax import argmax
from stoker_engine.kernels.cpu.block_panels import block_panels
from stoker_engine.kernels.cpu.linear import linear
from stoker_engine.kernels.cpu.matrix import concat_linear
from stoker_engine.kernels.cpu.panels import panels
from stoker_engine.kernels.cpu.rms_norm import rms_norm
from stoker_engine.kernels.cpu.rotary import apply_rotary, cos_sin
from stoker_engine.kernels.cpu.token_mask import keep_allowed
from stoker_engine.kernels.moe import float32_linear, grouped_linear, make_block_experts, make_experts
from stoker_engine.kernels.reference import REFERENCE
from stoker_engine.kernels.rms_norm import after_sum


@cache
def cpu_kernels(library: ctypes.CDLL) -> Kernels:
    """Return the bundle of a library, for tensors on the CPU in bfloat16 or float32. Results are batch-invariant: a row
    has the same bits in every batch."""
    multiply = partial(linear, library)
    multiply_blocks = partial(blocks.linear, library)

    def plain(act: Activation) -> Operation:
        return _activation(library, act, REFERENCE.activation, gated=False)

    def gated(act: Activation) -> Operation:
        if isinstance(act, ClampedSwiGLU):
            return partial(clamped_swiglu, library, act)
        return _activation(library, act, REFERENCE.act_and_mul, gated=True)

    return replace(
        REFERENCE,
        linear=multiply,
        batched_linear=lambda weight: by_head(grouped_linear(multiply, weight)),
        concat_linear=partial(concat_linear, library),
        experts=make_experts(multiply, gated),
        float32_linear=float32_linear(multiply),
        quant_linear=multiply_blocks,
        block_experts=make_block_experts(multiply_blocks, gated),
        block_rows=partial(blocks.rows, library),
        rms_norm=partial(rms_norm, library),
        add_rms_norm=lambda weight, eps: after_sum(rms_norm(library, weight, eps)),
        activation=plain,
        act_and_mul=gated,
        apply_rotary=partial(apply_rotary, library),
        cos_sin=partial(cos_sin, library),
        argmax=partial(argmax, library),
        narrow_logits=True,
        keep_allowed=partial(keep_allowed, library),
        panels=panels(library),
        block_panels=block_panels(library),
    )


def _activation(
    library: ctypes.CDLL, act: Activation, reference: Callable[[Activation], Operation], *, gated: bool
) -> Operation:
    kind = kind_of(act)
    return reference(act) if kind is None else partial(activation, library, kind, gated=gated)
