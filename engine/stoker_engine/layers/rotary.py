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


class Rotary(nn.Module):
    """cos and sin at a step's positions, for each kind of rotary embedding in a model.

    Computed anew each step, once for all layers: tables for every position of a long context would take hundreds
    of megabytes, to save microseconds.
    """

    def __init__(self, ropes: set[RopeParameters], head_dim: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self._frequencies = {rope: inverse_frequencies(rope, head_dim) for rope in ropes}

    def to_device(self, device: torch.device) -> None:
        """Moves the frequencies; they are no parameters, since no checkpoint holds them."""
        self._frequencies = {rope: frequencies.to(device) for rope, frequencies in self._frequencies.items()}

    def at(self, positions: torch.Tensor) -> dict[RopeParameters, tuple[torch.Tensor, torch.Tensor]]:
        """cos and sin [tokens, 1, head_dim] at `positions` [tokens], for each kind; computed in float32."""
        return {rope: self._cos_sin(positions, frequencies) for rope, frequencies in self._frequencies.items()}

    def _cos_sin(self, positions: torch.Tensor, frequencies: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = torch.outer(positions.float(), frequencies)
        angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)
