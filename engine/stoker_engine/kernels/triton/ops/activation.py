"""Activations, plain and gated (`kernels/activation.py` defines them). One program computes a part of a row.

Intermediate values are float32, except that gated activations other than `ClampedSwiGLU` round the activated gate.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
import triton
import triton.language as tl

from stoker_engine.architectures.activation import Activation, ClampedSwiGLU
from stoker_engine.kernels import activation as defined
from stoker_engine.kernels.bundle import Operation
from stoker_engine.kernels.triton.common.arithmetic import rounded, widened
from stoker_engine.kernels.triton.common.gpu_target import GpuTarget
from stoker_engine.kernels.triton.common.kernel_variant import KernelVariant
from stoker_engine.kernels.triton.common.operation import operation

_GELU, _GELU_TANH, _QUICK_GELU, _RELU, _RELU2, _SILU, _CLAMPED = range(7)
#: No activation: the input is the result.
IDENTITY: Final = 7
_KINDS: Final = {
    "gelu": _GELU,
    "gelu_fast": _GELU_TANH,
    "gelu_new": _GELU_TANH,
    "gelu_pytorch_tanh": _GELU_TANH,
    "quick_gelu": _QUICK_GELU,
    "relu": _RELU,
    "relu2": _RELU2,
    "silu": _SILU,
    "swish": _SILU,
}
_PART: Final = 1024


@triton.jit
def _activated(x, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    if KIND == 0:
        return 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    elif KIND == 1:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x * tl.sigmoid(2 * inner)  # (1 + tanh y) / 2 is the logistic function of 2 y
    elif KIND == 2:
        return x * tl.sigmoid(1.702 * x)
    elif KIND == 3:
        return tl.where(x <= 0, 0.0, x)  # keeps NaN
    elif KIND == 4:
        positive = tl.where(x <= 0, 0.0, x)
        return positive * positive
    elif KIND == 7:
        return x
    else:
        return x * tl.sigmoid(x)


@triton.jit
def activated_part(row, at, limit, alpha, SIZE: tl.constexpr, KIND: tl.constexpr, GATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the results at positions `at` of a row, rounded to the dtype of `row` (a pointer) and widened to float32.
    Beyond SIZE they are 0."""
    is_number = at < SIZE
    DTYPE: tl.constexpr = row.dtype.element_ty
    gate = widened(tl.load(row + at, mask=is_number, other=0.0))
    if KIND == 6:
        up = widened(tl.load(row + SIZE + at, mask=is_number, other=0.0))
        # Comparisons, unlike min and max, keep NaN.
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        result = gate * tl.sigmoid(gate * alpha) * (up + 1)
    else:
        result = _activated(gate, KIND)
        if GATED:
            up = widened(tl.load(row + SIZE + at, mask=is_number, other=0.0))
            result = widened(rounded(result, DTYPE)) * up
    return widened(rounded(result, DTYPE))


@triton.jit
def _activate(  # type: ignore[no-untyped-def]
    x,
    out,
    limit,
    alpha,
    x_row: tl.int64,
    SIZE: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    PART: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * PART + tl.arange(0, PART)
    result = activated_part(x + row * x_row, at, limit, alpha, SIZE, KIND, GATED)
    tl.store(out + row * SIZE + at, rounded(result, out.dtype.element_ty), mask=at < SIZE)


@operation("stoker::activate")
def _run(x: torch.Tensor, kind: int, gated: bool, limit: float, alpha: float) -> torch.Tensor:
    size = x.shape[-1] // 2 if gated else x.shape[-1]
    out = torch.empty((*x.shape[:-1], size), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    rows = x if x.dim() == 2 and x.stride(1) == 1 else x.contiguous().view(-1, x.shape[-1])
    _activate[(len(rows), triton.cdiv(size, _PART))](
        rows, out, limit, alpha, rows.stride(0), SIZE=size, KIND=kind, GATED=gated, PART=_PART, num_warps=4
    )
    return out


@_run.register_fake
def _(x: torch.Tensor, kind: int, gated: bool, limit: float, alpha: float) -> torch.Tensor:
    size = x.shape[-1] // 2 if gated else x.shape[-1]
    return torch.empty((*x.shape[:-1], size), dtype=x.dtype, device=x.device)


def constants_of(act: Activation) -> tuple[int, float, float]:
    """Return the kernels' `KIND`, `limit` and `alpha` of a gated activation.

    Raises:
        ModelError: the activation is not supported.
    """
    if isinstance(act, ClampedSwiGLU):
        return _CLAMPED, float(act.limit), float(act.alpha)
    defined.activation(act)
    return _KINDS[str(act)], 0.0, 0.0


def activation(act: Activation) -> Operation:
    """See `kernels.activation.activation`."""
    defined.activation(act)
    kind = _KINDS[str(act)]
    return lambda x: _run(x, kind, False, 0.0, 0.0)


def act_and_mul(act: Activation) -> Operation:
    """See `kernels.activation.act_and_mul`."""
    kind, limit, alpha = constants_of(act)
    return lambda x: _run(x, kind, True, limit, alpha)


def kernel_variants(gpu: GpuTarget) -> Iterator[KernelVariant]:
    """See `attention.decode.kernel_variants`."""
    for name, kind, gated in (("silu", _SILU, True), ("gelu", _GELU, False), ("clamped swiglu", _CLAMPED, True)):
        yield KernelVariant.of(
            f"activation {name}",
            _activate,
            {"x": "bf16", "out": "bf16"},
            {"limit": "fp32", "alpha": "fp32"},
            {"SIZE": 14336, "KIND": kind, "GATED": gated, "PART": _PART},
        )
