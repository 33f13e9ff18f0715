"""Activations in 8 bits: what the CPU's kernels multiply with weights in blocks in panels, as integers and so exactly.

Of each 32 numbers of a row the largest becomes 127 or −127 of a scale of their own, and all are rounded to the nearest
multiple of it, as llama.cpp does. The products of what shares a scale are added up without an error, and these sums in
float32. Scales of weights are those of their blocks or groups.
"""

from __future__ import annotations

from typing import Final

import torch

#: Numbers that share a scale.
GROUP: Final = 32

#: Where the largest number of a group is below it, all of them become 0.
LEAST: Final = 1e-30


def in_eight_bits(x: torch.Tensor) -> torch.Tensor:
    """`x` [..., inner] bfloat16, `inner` a multiple of 32 → what is multiplied, float64."""
    groups = x.float().unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(-1, keepdim=True)
    inverse = torch.where(largest < LEAST, 0.0, torch.full_like(largest, 127) / largest)
    scale = largest / torch.full_like(largest, 127)
    multiplied: torch.Tensor = (groups * inverse).round().double() * scale.double()
    return multiplied.flatten(-2)
