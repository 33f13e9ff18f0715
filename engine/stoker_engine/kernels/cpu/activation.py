"""Binding of activation.cpp."""

from __future__ import annotations

import ctypes
from typing import Final

import torch

from stoker_engine.architectures.activation import Activation, ClampedSwiGLU

#: `ActivationKind` of activation.h.
SILU, GELU_TANH, GELU = range(3)

_KINDS: Final = {
    "gelu": GELU,
    "gelu_fast": GELU_TANH,
    "gelu_new": GELU_TANH,
    "gelu_pytorch_tanh": GELU_TANH,
    "silu": SILU,
    "swish": SILU,
}


def kind_of(act: Activation) -> int | None:
    """Return the kind of a config's activation; None if there is no kernel for it."""
    return _KINDS.get(act) if isinstance(act, str) else None


def activation(library: ctypes.CDLL, kind: int, x: torch.Tensor, gated: bool) -> torch.Tensor:
    """Return act(x); if `gated`, act(gate) × up of `x` [tokens, 2 × size] with the gates first."""
    if x.dim() != 2 or x.stride(1) != 1:
        return activation(library, kind, x.reshape(-1, x.shape[-1]).contiguous(), gated).view(
            *x.shape[:-1], x.shape[-1] // (1 + gated)
        )
    tokens, width = x.shape
    size = width // 2 if gated else width
    out = torch.empty(tokens, size, dtype=x.dtype)
    library.stoker_activation(
        x.dtype == torch.bfloat16, kind, gated, x.data_ptr(), x.stride(0), out.data_ptr(), tokens, size
    )
    return out


def clamped_swiglu(library: ctypes.CDLL, act: ClampedSwiGLU, x: torch.Tensor) -> torch.Tensor:
    """Return the clamped SwiGLU of `x` [tokens, 2 × size] with the gates first."""
    if x.dim() != 2 or x.stride(1) != 1:
        return clamped_swiglu(library, act, x.reshape(-1, x.shape[-1]).contiguous()).view(*x.shape[:-1], -1)
    tokens, width = x.shape
    out = torch.empty(tokens, width // 2, dtype=x.dtype)
    library.stoker_clamped_swiglu(
        x.dtype == torch.bfloat16,
        act.alpha,
        act.limit,
        x.data_ptr(),
        x.stride(0),
        out.data_ptr(),
        tokens,
        width // 2,
    )
    return out
