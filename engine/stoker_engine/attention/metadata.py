"""What attention must know about a step, computed once and shared by all layers.

Sequences that compute one token (*decodes*) lie first in the flat batch and run as one padded call; the
others (*chunks* of prompts) run one by one, each against its own keys.

    flat batch   │ d0 │ d1 │ d2 │ c0 c0 c0 c0 │ c1 c1 │
    rows           0    1    2    3 … 6         7 8
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DecodeView:
    """The keys that a step's decodes see, through one window.

    Attributes:
        blocks: [decodes, blocks] block numbers, padded with 0.
        mask: [decodes, 1, 1, blocks × block_size], true where the key is visible.
    """

    blocks: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True)
class ChunkView:
    """The keys that one chunk sees, through one window.

    Attributes:
        rows: the chunk's rows in the flat batch.
        blocks: [blocks] block numbers.
        mask: [1, 1, chunk, blocks × block_size], true where the key is visible.
    """

    rows: slice
    blocks: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True)
class AttentionMetadata:
    """One step's attention inputs.

    Attributes:
        slots: [tokens] where each token's key and value go.
        num_decodes: how many of the first rows are decodes.
        decodes: for each window (None: no window) what the decodes see.
        chunks: likewise for the chunks.
    """

    slots: torch.Tensor
    num_decodes: int
    decodes: dict[int | None, DecodeView]
    chunks: dict[int | None, list[ChunkView]]
