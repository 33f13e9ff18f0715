"""Activations of the MLP, by transformers' names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch.nn import functional

from stoker_engine.contract.errors import ModelError
from stoker_engine.kernels.native import activation as native
from stoker_engine.kernels.native.library import kernels_for

Activation = Callable[[torch.Tensor], torch.Tensor]


def _silu(x: torch.Tensor) -> torch.Tensor:
    library = kernels_for(x)
    return functional.silu(x) if library is None else native.activation(library, native.SILU, x, gated=False)


def _gelu(x: torch.Tensor) -> torch.Tensor:
    library = kernels_for(x)
    return functional.gelu(x) if library is None else native.activation(library, native.GELU, x, gated=False)


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    library = kernels_for(x)
    if library is None:
        return functional.gelu(x, approximate="tanh")
    return native.activation(library, native.GELU_TANH, x, gated=False)


def _relu_squared(x: torch.Tensor) -> torch.Tensor:
    return functional.relu(x).square()


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


_ACTIVATIONS: Final[dict[str, Activation]] = {
    "gelu": _gelu,
    "gelu_fast": _gelu_tanh,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "relu": functional.relu,
    "relu2": _relu_squared,
    "silu": _silu,
    "swish": _silu,
}

#: Those that the CPU's kernels multiply by the other half in one pass.
_GATED: Final[dict[Activation, int]] = {_silu: native.SILU, _gelu: native.GELU, _gelu_tanh: native.GELU_TANH}


def activation(name: str) -> Activation:
    """The activation with that config.json name.

    Raises:
        ModelError: it is not known.
    """
    if name not in _ACTIVATIONS:
        raise ModelError(f"activation {name!r} is not supported; supported are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def act_and_mul(gate_up: torch.Tensor, act: Activation) -> torch.Tensor:
    """act(gate) × up, where `gate_up` [tokens, 2 × size] holds the gates first; [tokens, size]."""
    library = kernels_for(gate_up)
    if library is not None and act in _GATED:
        return native.activation(library, _GATED[act], gate_up, gated=True)
    gate, up = gate_up.chunk(2, dim=-1)
    return act(gate) * up
