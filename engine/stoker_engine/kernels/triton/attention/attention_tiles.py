"""Tile sizes of attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stoker_engine.kernels.triton.common.float8 import PLAIN
from stoker_engine.kernels.triton.common.gpu_target import GpuTarget


@dataclass(frozen=True)
class Tiles:
    """Tile sizes and compile options.

    Attributes:
        rows, keys: size of a tile, powers of two, at least 16; rows are queries × heads that share a KV head.
        warps, stages: compile options.
        unmasked: whether, without a sliding window, a separate loop without masks handles keys that all queries see.
    """

    rows: int
    keys: int
    warps: int = 4
    stages: int = 3
    unmasked: bool = False


def tiles_of(head_dim: int, dtype: torch.dtype, code: int, are_decodes: bool, gpu: GpuTarget) -> Tiles:
    """Return the tile sizes of a layer, which do not depend on the batch. `code` is the cache's storage format.

    With them kernels neither spill (`ahead_of_time`) nor exceed shared memory. For 16-bit elements and head dimensions
    of 64, 128 and 256 they are the fastest such sizes on an H200.
    """
    is_amd = gpu.is_amd
    if head_dim > 256:
        if is_amd:  # in float32 still too large for gfx90a and gfx942
            return Tiles(16, 16, warps=4 if code else 8, stages=2)
        if dtype == torch.float32:
            return Tiles(16, 16, warps=8, stages=1)
        if are_decodes:
            return Tiles(16, 16 if code else 32, warps=8, stages=3)
        return Tiles(16, 32 if code else 16, warps=8, stages=2)
    # Dequantization needs registers, of which AMD GPUs have more.
    is_costly = code != PLAIN and not is_amd
    if dtype == torch.float32:  # without tensor cores, which would lose precision
        is_costly = is_costly and head_dim > 64
        has_more = is_costly or (are_decodes and not is_amd)
        return Tiles(16, 16, warps=8 if has_more else 4, stages=1 if is_costly else 2)
    in_two_parts = head_dim & (head_dim - 1) != 0
    is_costly = is_costly and in_two_parts
    if are_decodes:
        if code == PLAIN and not is_amd and not in_two_parts:
            keys = 128 if head_dim <= 64 else 64 if head_dim <= 128 else 32
            return Tiles(16, keys, stages=2)
        if head_dim > 128:
            return Tiles(16, 32)
        return Tiles(16, 32 if in_two_parts else 64, warps=8 if is_costly else 4)
    if is_costly:
        return Tiles(32, 16, stages=2)
    if code == PLAIN and gpu.has_room and not in_two_parts:
        if head_dim > 128:
            return Tiles(128, 64, warps=8, stages=2, unmasked=True)
        return Tiles(64, 64, stages=2, unmasked=True)
    if head_dim > 128:
        return Tiles(32, 32, stages=2, unmasked=code == PLAIN)
    return Tiles(32 if code and in_two_parts else 64, 32, unmasked=code == PLAIN)
