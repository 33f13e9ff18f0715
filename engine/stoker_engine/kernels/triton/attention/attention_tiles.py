"""How attention is cut into tiles."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stoker_engine.kernels.triton.attention.decode_splits import PART_KEYS
from stoker_engine.kernels.triton.common.float8 import PLAIN
from stoker_engine.kernels.triton.common.gpu_target import GpuTarget


@dataclass(frozen=True)
class Tiles:
    """How work is cut.

    Attributes:
        rows: of a tile, which are queries × heads that share a KV head; a power of two of 16 at least.
        keys: of a tile; in the same way.
        split_keys: that one program goes over, a multiple of `keys`; 0: all.
        warps, stages: of the compiled kernel.
        unmasked: keys that all of a tile's queries see are gone over without masks, by code of its own.
    """

    rows: int
    keys: int
    split_keys: int = 0
    warps: int = 4
    stages: int = 3
    unmasked: bool = False


def tiles_of(head_dim: int, dtype: torch.dtype, code: int, are_decodes: bool, gpu: GpuTarget) -> Tiles:
    """How work is cut, by what is fixed for a layer: the same for each of its rows in every batch. Chosen so that no
    number is spilled, and that a program's shared memory is there (`ahead_of_time`); among those, what was fastest on
    an H200, where it was measured: 16-bit numbers in heads of 64, 128 and 256.
    """
    is_amd = gpu.is_amd
    split_keys = PART_KEYS if are_decodes else 0
    if head_dim > 256:
        if is_amd:
            return Tiles(16, 16, split_keys, warps=4 if code else 8, stages=2)
        if dtype == torch.float32:  # even so too large for gfx90a and gfx942
            return Tiles(16, 16, split_keys, warps=8, stages=1)
        if are_decodes:
            return Tiles(16, 16 if code else 32, split_keys, warps=8, stages=3)
        return Tiles(16, 32 if code else 16, warps=8, stages=2)
    # Decoding takes registers; AMD's GPUs have more of them.
    is_costly = code != PLAIN and not is_amd
    if dtype == torch.float32:  # without tensor cores, where it would lose digits
        is_costly = is_costly and head_dim > 64
        has_more = is_costly or (are_decodes and not is_amd)
        return Tiles(16, 16, split_keys, warps=8 if has_more else 4, stages=1 if is_costly else 2)
    in_two_parts = head_dim & (head_dim - 1) != 0
    is_costly = is_costly and in_two_parts
    if are_decodes:
        if code == PLAIN and not is_amd and not in_two_parts:
            keys = 128 if head_dim <= 64 else 64 if head_dim <= 128 else 32
            return Tiles(16, keys, split_keys, stages=2)
        if head_dim > 128:
            return Tiles(16, 32, split_keys)
        return Tiles(16, 32 if in_two_parts else 64, split_keys, warps=8 if is_costly else 4)
    if is_costly:
        return Tiles(32, 16, stages=2)
    if code == PLAIN and gpu.has_room and not in_two_parts:
        if head_dim > 128:
            return Tiles(128, 64, warps=8, stages=2, unmasked=True)
        return Tiles(64, 64, stages=2, unmasked=True)
    if head_dim > 128:
        return Tiles(32, 32, stages=2, unmasked=code == PLAIN)
    return Tiles(32 if code and in_two_parts else 64, 32, unmasked=code == PLAIN)
