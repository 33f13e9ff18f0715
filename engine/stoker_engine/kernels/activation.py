"""Gated activations of the MLP: act(gate) × up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch.nn import functional

from stoker_engine.contract.errors import ModelError

_ACTIVATIONS: Final[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "silu": functional.silu,
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu": functional.gelu,
}


def activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The activation with that config.json name.

    Raises:
        ModelError: it is not known.
    """
    if name not in _ACTIVATIONS:
        raise ModelError(f"activation {name!r} is not supported; supported are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]
