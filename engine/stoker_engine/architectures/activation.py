"""Activations of MLPs and experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class ClampedSwiGLU:
    """gpt-oss's gated activation: g σ(alpha g) × (u + 1), with g = min(gate, limit) and u = up clamped to ± limit."""

    alpha: float
    limit: float


#: Transformers' name of the activation, or an activation with parameters.
Activation = str | ClampedSwiGLU

#: Supported activations, by transformers' names.
ACTIVATIONS: Final = (
    "gelu", "gelu_fast", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "relu", "relu2", "silu", "swish",
)  # fmt: skip


def why_not_computed(act: Activation) -> str:
    """Return why the activation is not supported, or an empty string if it is."""
    if not isinstance(act, str) or act in ACTIVATIONS:
        return ""
    return f"activation {act!r} is not supported; supported are {', '.join(ACTIVATIONS)}"
