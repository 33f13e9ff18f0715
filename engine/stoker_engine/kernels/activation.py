"""Activations of MLPs: those named as in transformers, and those with parameters."""

from __future__ import annotations

from functools import partial
from typing import Final

import torch
from torch.nn import functional

from stoker_common.errors import ModelError
from stoker_engine.architectures.activation import Activation, ClampedSwiGLU, why_not_computed
from stoker_engine.kernels.bundle import Operation

_gelu_tanh: Final = partial(functional.gelu, approximate="tanh")

_ACTIVATIONS: Final[dict[str, Operation]] = {
    "gelu": functional.gelu,
    "gelu_fast": _gelu_tanh,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
    "silu": functional.silu,
    "swish": functional.silu,
}


def activation(act: Activation) -> Operation:
    """Return the activation with a name from config.json.

    Raises:
        ModelError: the activation is unknown, or valid only for gated MLPs.
    """
    if why := why_not_computed(act):
        raise ModelError(why)
    if not isinstance(act, str):
        raise ModelError(f"activation {act!r} is supported only in gated MLPs")
    return _ACTIVATIONS[act]


def act_and_mul(act: Activation) -> Operation:
    """Return the operation act(gate) × up of [tokens, 2 × size] with the gates first.

    Raises:
        ModelError: the activation is unknown.
    """
    if isinstance(act, ClampedSwiGLU):
        return partial(_clamped_swiglu, act)
    of_gate = activation(act)

    def gated(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return of_gate(gate) * up

    return gated


def _clamped_swiglu(act: ClampedSwiGLU, gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=act.limit), up.clamp(-act.limit, act.limit)
    return gate * torch.sigmoid(gate * act.alpha) * (up + 1)
