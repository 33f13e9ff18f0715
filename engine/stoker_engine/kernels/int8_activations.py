"""8-bit activations, which the CPU kernels multiply with block-quantized weights in panels by integer arithmetic.

Every 32 elements of a row share a scale, by which the largest becomes ±127, and are rounded to the nearest multiple of
it, as in llama.cpp. Dot products of elements that share a scale are exact integer sums, which are scaled and added in
float32. Weights keep the scales of their blocks or groups.

Where every 128 or 256 consecutive weights of a row share a scale (not in GGUF), activations form blocks of that size:
the scale of 32 activations is then the block's scale times an integer from 1 to 255, the smallest with which none of
them overflows. Integers are accumulated over a whole block.
"""

from __future__ import annotations

from typing import Final

import torch

from stoker_engine.architectures.stored_formats import GGUFFormat, StoredFormat

#: Number of elements that share a scale.
GROUP: Final = 32

#: All elements of a group or block become 0 if the largest magnitude is below this.
LEAST: Final = 1e-30

_BLOCKS: Final = (256, 128)
_MOST: Final = 255


def block_of(stored: StoredFormat, inner: int) -> int:
    """Return how many activations form a block when multiplied with rows of `inner` elements in the format `stored`."""
    if isinstance(stored, GGUFFormat):
        return GROUP
    one = stored.groups(inner) == 1
    return next((block for block in _BLOCKS if one or stored.group % block == 0), GROUP)


def int8_activations(x: torch.Tensor, block: int = GROUP) -> torch.Tensor:
    """Return the values to which the kernels round `x`, float64.

    Args:
        x: bfloat16 [..., inner], `inner` a multiple of 32.
        block: size of a block, see `block_of`.
    """
    groups = x.float().unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(-1, keepdim=True)
    if block == GROUP:
        scale = largest / torch.full_like(largest, 127)
        inverse = torch.where(largest < LEAST, 0.0, torch.full_like(largest, 127) / largest)
    else:
        of_units = largest
        largest = torch.cat([
            units.amax(-2, keepdim=True).expand_as(units) for units in largest.split(block // GROUP, dim=-2)
        ], dim=-2)  # fmt: skip
        block_scale = largest / torch.full_like(largest, 127 * _MOST)
        factor = (of_units * (torch.full_like(largest, _MOST) / largest)).clamp(1, _MOST).ceil()
        scale = block_scale * factor
        inverse = torch.where(largest < LEAST, 0.0, 1 / scale)
        scale = block_scale.double() * factor.double()
    multiplied: torch.Tensor = (groups * inverse).round().double() * scale.double()
    return multiplied.flatten(-2)
