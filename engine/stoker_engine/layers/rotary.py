"""Rotary frequencies: the plain ones, and stretched to longer contexts."""

from __future__ import annotations

import math

import torch
from torch import nn

from stoker_engine.contract.model_config import RopeParameters


def inverse_frequencies(rope: RopeParameters, head_dim: int) -> torch.Tensor:
    """[head_dim / 2] float32: radians a position turns each pair by.

    ``linear`` slows every pair by `factor` (Chen et al., 2023). ``llama3`` leaves short wavelengths alone,
    slows long ones by `factor`, and blends between (Llama 3.1's reference code).
    """
    frequencies = 1.0 / rope.rope_theta ** (torch.arange(0, head_dim, 2, dtype=torch.float) / head_dim)
    if rope.rope_type == "linear":
        return frequencies / rope.factor
    if rope.rope_type == "llama3":
        wavelengths = 2 * math.pi / frequencies
        original = rope.original_max_position_embeddings
        blend = (original / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        blend = blend.clamp(0, 1)
        return (1 - blend) * frequencies / rope.factor + blend * frequencies
    return frequencies


class RotaryTables(nn.Module):
    """cos and sin of every position, for each kind of rotary embedding in a model."""

    def __init__(self, ropes: set[RopeParameters], head_dim: int, max_positions: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._tables: dict[RopeParameters, tuple[torch.Tensor, torch.Tensor]] = {}
        positions = torch.arange(max_positions, dtype=torch.float)
        for rope in ropes:
            angles = torch.outer(positions, inverse_frequencies(rope, head_dim))
            angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)  # [positions, 1, head_dim]
            self._tables[rope] = (angles.cos().to(dtype), angles.sin().to(dtype))

    def to_device(self, device: torch.device) -> None:
        """Moves the tables; they are no parameters, since no checkpoint holds them."""
        self._tables = {rope: (cos.to(device), sin.to(device)) for rope, (cos, sin) in self._tables.items()}

    def at(self, positions: torch.Tensor) -> dict[RopeParameters, tuple[torch.Tensor, torch.Tensor]]:
        """cos and sin [tokens, 1, head_dim] at `positions` [tokens], for each kind."""
        return {rope: (cos[positions], sin[positions]) for rope, (cos, sin) in self._tables.items()}
