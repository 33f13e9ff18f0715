"""Activations of the MLP, as a config states them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class ClampedSwiGLU:
    """gpt-oss's gate: g σ(α g) × (u + 1), with g = min(gate, limit) and u = up, kept within ± limit.

    Attributes:
        alpha: α.
        limit: that of the clamps.
    """

    alpha: float
    limit: float


#: By transformers' name, or one that has numbers of its own.
Activation = str | ClampedSwiGLU

#: Those that are computed, by transformers' names.
ACTIVATIONS: Final = (
    "gelu", "gelu_fast", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "relu", "relu2", "silu", "swish",
)  # fmt: skip


def why_not_computed(act: Activation) -> str:
    """Why an MLP with that activation is refused; empty: it is computed, or has numbers of its own."""
    if not isinstance(act, str) or act in ACTIVATIONS:
        return ""
    return f"activation {act!r} is not supported; supported are {', '.join(ACTIVATIONS)}"
