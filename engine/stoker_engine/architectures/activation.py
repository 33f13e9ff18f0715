"""Activations of the MLP, as a config states them."""

from __future__ import annotations

from dataclasses import dataclass


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
