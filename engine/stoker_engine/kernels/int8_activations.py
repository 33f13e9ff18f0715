"""Activations in 8 bits: what the CPU's kernels multiply with weights in blocks in panels, as integers and so exactly.

Of each 32 elements of a row the largest becomes 127 or −127 of a scale of their own, and all are rounded to the nearest
multiple of it, as llama.cpp does. The dot products of what shares a scale are added up without an error, and these sums
in float32. Scales of weights are those of their blocks or groups.

Where 128 or 256 weights share a scale, so do as many activations, a block: the scale of 32 of them is then a multiple
of the block's, by a factor of 1 to 255, the least by which none of them is too large. Integers add up over a block.
"""

from __future__ import annotations

from typing import Final

import torch

from stoker_engine.architectures.stored_formats import GGUFFormat, StoredFormat

#: Elements that share a scale.
GROUP: Final = 32

#: Where the largest number of a group or block is below it, all of them become 0.
LEAST: Final = 1e-30

_BLOCKS: Final = (256, 128)
_MOST: Final = 255


def block_of(stored: StoredFormat, inner: int) -> int:
    """How many activations share a scale where they are multiplied with rows of `inner` elements."""
    if isinstance(stored, GGUFFormat):
        return GROUP
    one = stored.groups(inner) == 1
    return next((block for block in _BLOCKS if one or stored.group % block == 0), GROUP)


def int8_activations(x: torch.Tensor, block: int = GROUP) -> torch.Tensor:
    """`x` [..., inner] bfloat16, `inner` a multiple of 32 → what is multiplied, float64; `block` as `block_of` says."""
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
