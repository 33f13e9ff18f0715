"""Tiles of LoRA: rows are grouped into tiles with a single adapter, and matrices are cut into tiles of fixed sizes.

    slots of rows    0  2  –  2  2  0            –: no adapter, or padding
    tiles of 4       rows 0 5 – –    rows 1 3 4 –    unused    unused
    their slots      0               2               none      none

Sizes depend on constants of the engine (dtype, largest rank) or of a matrix, never on the batch: a row's bits do not
depend on the adapters of other rows. The sizes are not tuned.
"""

from __future__ import annotations

from typing import Final

import torch

from stoker_engine.kernels.bundle import AdapterTiles
from stoker_engine.kernels.triton.moe.align import align

#: Number of inner elements that one program of shrink sums; expand adds the partial sums in order. Without this split a
#: single row would leave most of a GPU idle.
SPLIT: Final = 1024

#: Largest number of inner elements, and of ranks, that are multiplied at once.
STEP: Final = 128
_MAX_RANKS: Final = 64


def tile_rows(dtype: torch.dtype) -> int:
    """Return the rows of a tile for matrices of `dtype`; fewer for float32, which does not use tensor cores."""
    return 16 if dtype == torch.float32 else 32


def tile_outputs(dtype: torch.dtype) -> int:
    """Return the number of outputs of a program of expand."""
    return 64 if dtype == torch.float32 else 128


def step_of(dtype: torch.dtype) -> int:
    """Return the number of inner elements that shrink multiplies at once."""
    return 32 if dtype == torch.float32 else STEP


def tile_ranks(max_rank: int, dtype: torch.dtype) -> int:
    """Return the number of ranks per program of shrink, and per iteration of expand."""
    limit: int = 32 if dtype == torch.float32 else _MAX_RANKS
    return next(ranks for ranks in (16, 32, 64) if ranks >= min(max_rank, limit))


def num_splits(inner: int) -> int:
    """Return the number of partial sums of shrink for `inner` elements."""
    return -(-inner // SPLIT)


def group(slots: torch.Tensor, num_slots: int, dtype: torch.dtype) -> AdapterTiles:
    """See `GroupedLora.group`. Does not synchronize; shapes depend only on the number of rows."""
    return AdapterTiles(*align(slots, num_slots, tile_rows(dtype)))
