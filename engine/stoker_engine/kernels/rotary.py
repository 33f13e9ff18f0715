"""Rotary position embedding (Su et al., 2021)."""

from __future__ import annotations

import torch


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """Rotate the first r elements of each head of `x` [tokens, heads, d] by the angles of `cos` and `sin`
    [tokens, 1, r / 2]; the other d - r are unchanged.

    Elements of pair i: (i, i + r/2) in the layout of GPT-NeoX and Llama, (2i, 2i + 1) if `interleaved` (GPT-J).
    """
    rotary_dim = 2 * cos.shape[-1]
    rotated, unrotated = (x, None) if rotary_dim == x.shape[-1] else (x[..., :rotary_dim], x[..., rotary_dim:])
    if interleaved:
        first, second = rotated[..., ::2], rotated[..., 1::2]
        rotated = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
        return rotated if unrotated is None else torch.cat((rotated, unrotated), dim=-1)
    first, second = rotated.chunk(2, dim=-1)
    parts = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(parts if unrotated is None else (*parts, unrotated), dim=-1)


def concat_rotated(
    x: torch.Tensor, rotated: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False
) -> torch.Tensor:
    """Concatenate `x` [tokens, heads, d] and the rotated `rotated` [tokens, heads, r] → [tokens, heads, d + r]."""
    return torch.cat((x, apply_rotary(rotated, cos, sin, interleaved)), dim=-1)


def cos_sin(
    positions: torch.Tensor, frequencies: torch.Tensor, scale: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin [tokens, 1, pairs] of position × frequency, times `scale`; float32 rounded to `dtype`.

    Args:
        positions: [tokens] int64.
        frequencies: [pairs] float32.
    """
    angles = torch.outer(positions.float(), frequencies).unsqueeze(1)
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)
