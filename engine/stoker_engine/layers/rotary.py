"""Rotary position embeddings (RoPE): frequencies of a head's pairs, and cos and sin of a step's positions.

The frequencies of the types dynamic and longrope depend on the sequence length. They are computed once, for the longest
sequence that the engine allows (``--max-model-len``): if they changed later, cached keys would be wrong.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from stoker_engine.architectures.rope_config import RopeParameters
from stoker_engine.attention.backend import RopeCosSin
from stoker_engine.kernels.bundle import Kernels


def inverse_frequencies(rope: RopeParameters, max_model_len: int) -> torch.Tensor:
    """Return the inverse frequencies [⌈rotary_dim / 2⌉] float32: rotation of each pair in radians per position, for
    sequences of up to `max_model_len` tokens.

        linear     divides all frequencies by `factor` (Chen et al., 2023)
        dynamic    raises the base with the length beyond the original one ("NTK-aware", bloc97 and emozilla, 2023)
        llama3     keeps short wavelengths, divides the frequencies of long ones by `factor`, and interpolates in
                   between (Llama 3.1's reference code)
        yarn       like llama3, but interpolates linearly in the pair's index, between two pairs that are given by their
                   numbers of rotations within the original length (Peng et al., 2023)
        longrope   divides each frequency by its own factor, found by search; there is a set of factors for lengths up
                   to the original one, and a set for longer ones (Ding et al., 2024)

    Other types use the frequencies of the base.
    """
    base, dim = rope.rope_theta, rope.rotary_dim
    if rope.rope_type == "dynamic" and max_model_len > rope.max_position_embeddings:
        stretch = rope.factor * max_model_len / rope.max_position_embeddings - (rope.factor - 1)
        base *= stretch ** (dim / (dim - 2))
    frequencies = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float) / dim)
    if rope.rope_type == "linear":
        return frequencies / rope.factor
    if rope.rope_type == "llama3":
        return _llama3(rope, frequencies)
    if rope.rope_type == "yarn":
        return _yarn(rope, frequencies)
    if rope.rope_type == "longrope":
        beyond = max_model_len > rope.original_max_position_embeddings
        return frequencies / torch.tensor(rope.long_factor if beyond else rope.short_factor)
    return frequencies


def _llama3(rope: RopeParameters, frequencies: torch.Tensor) -> torch.Tensor:
    wavelengths = 2 * math.pi / frequencies
    original = rope.original_max_position_embeddings
    blend = (original / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * frequencies / rope.factor + blend * frequencies


def _yarn(rope: RopeParameters, frequencies: torch.Tensor) -> torch.Tensor:
    def pair_with(turns: float) -> float:
        """Return the index of the pair that makes `turns` rotations within the original length; not an integer."""
        wavelength = rope.original_max_position_embeddings / (turns * 2 * math.pi)
        return rope.rotary_dim * math.log(wavelength) / (2 * math.log(rope.rope_theta))

    low, high = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    span = high - low if high != low else 0.001
    slowed = ((torch.arange(len(frequencies), dtype=torch.float) - low) / span).clamp(0, 1)
    return frequencies / rope.factor * slowed + frequencies * (1 - slowed)


@dataclass(frozen=True, eq=False)
class Rotation(RopeCosSin):
    """Cos and sin of a step's positions, and the operations that rotate by them."""

    kernels: Kernels

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Rotate `x` [tokens, heads, head_dim]; see `kernels.rotary.apply_rotary`."""
        return self.kernels.apply_rotary(x, self.cos, self.sin, self.interleaved)

    def joined(self, x: torch.Tensor, rotated: torch.Tensor) -> torch.Tensor:
        """See `kernels.rotary.concat_rotated`."""
        return self.kernels.concat_rotated(x, rotated, self.cos, self.sin, self.interleaved)


class Rotary:
    """Cos and sin of a step's positions, for each kind of rotary embedding in a model.

    They are computed in each step, once for all layers: tables for every position of a long context would take hundreds
    of megabytes to save microseconds.

    Args:
        ropes: the model's kinds of rotary embedding.
        max_model_len: longest sequence in tokens.
        dtype: the model's dtype, to which cos and sin are rounded.
        device: device of the positions; None: torch's default device.
    """

    def __init__(
        self,
        ropes: Sequence[RopeParameters],
        max_model_len: int,
        dtype: torch.dtype,
        kernels: Kernels,
        device: torch.device | None = None,
    ) -> None:
        self.dtype = dtype
        self.kernels = kernels
        self._frequencies = [(rope, inverse_frequencies(rope, max_model_len).to(device)) for rope in ropes]

    def at(self, positions: torch.Tensor) -> list[Rotation]:
        """Return cos and sin at `positions` [tokens] for each kind, computed in float32."""
        return [self._rotation(positions, rope, each) for rope, each in self._frequencies]

    def _rotation(self, positions: torch.Tensor, rope: RopeParameters, frequencies: torch.Tensor) -> Rotation:
        cos, sin = self.kernels.cos_sin(positions, frequencies, rope.attention_factor, self.dtype)
        return Rotation(cos, sin, rope.interleaved, self.kernels)
