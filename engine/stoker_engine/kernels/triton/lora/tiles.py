"""How the work of adapters is cut: rows into tiles that each belong to one adapter, matrices into parts of fixed sizes.

    slots of rows    0  2  –  2  2  0            – : no adapter
    tiles of 4       rows 0 5 – –    rows 1 3 4 –    unused    unused
    their slots      0               2               none      none

Sizes depend on what is fixed for an engine (the dtype, the largest rank) or for a matrix, never on what is in the
batch: a row has the same bits whichever adapters other rows have. They were not measured on a GPU yet.
"""

from __future__ import annotations

from typing import Final

import torch

from stoker_engine.kernels.bundle import AdapterTiles
from stoker_engine.kernels.triton.moe.align import align

#: Inner elements that one program of shrink sums up; expand adds the sums, in their order. One row alone would else
#: leave most of a GPU idle.
SPLIT: Final = 1024

#: Inner elements, and ranks, that are multiplied at once, at most.
STEP: Final = 128
_MAX_RANKS: Final = 64


def tile_rows(dtype: torch.dtype) -> int:
    """Rows of a tile, for matrices of `dtype`: fewer in float32, which has no tensor cores."""
    return 16 if dtype == torch.float32 else 32


def tile_outputs(dtype: torch.dtype) -> int:
    """Outputs of one program of expand."""
    return 64 if dtype == torch.float32 else 128


def step_of(dtype: torch.dtype) -> int:
    """Inner elements that shrink multiplies at once."""
    return 32 if dtype == torch.float32 else STEP


def tile_ranks(max_rank: int, dtype: torch.dtype) -> int:
    """Ranks that one program of shrink has, and that expand multiplies at once."""
    limit: int = 32 if dtype == torch.float32 else _MAX_RANKS
    return next(ranks for ranks in (16, 32, 64) if ranks >= min(max_rank, limit))


def num_splits(inner: int) -> int:
    """Sums that shrink makes of `inner` elements."""
    return -(-inner // SPLIT)


def group(slots: torch.Tensor, num_slots: int, dtype: torch.dtype) -> AdapterTiles:
    """See `GroupedLora.group`. Nothing waits for the device, and shapes depend on the number of rows alone."""
    return AdapterTiles(*align(slots, num_slots, tile_rows(dtype)))
