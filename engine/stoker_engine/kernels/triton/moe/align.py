"""Groups the rows of each expert into tiles with a fixed number of rows.

    choices         t0: e2 e0   t1: e2 e3   t2: e0 e2       numbered 0 … 5, token by token
    tiles of 4      1 4 – –     0 2 5 –     3 – – –
    their experts   0           2           3           none, none, …

The number of tiles is an upper bound; the last program marks unused tiles. Each other program handles one expert: it
counts the choices of all experts to find its first tile, then writes its own choices there in order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
import triton
import triton.language as tl

from stoker_engine.kernels.triton.common.gpu_target import GpuTarget
from stoker_engine.kernels.triton.common.kernel_variant import KernelVariant
from stoker_engine.kernels.triton.common.operation import operation

_PART: Final = 1024
#: Largest number of experts whose choices are counted at once.
_WINDOW: Final = 1023


@triton.jit(do_not_specialize=["choices", "capacity"])
def _align(  # type: ignore[no-untyped-def]
    chosen,
    rows,
    tile_experts,
    choices,
    capacity,
    EXPERTS: tl.constexpr,
    WINDOW: tl.constexpr,
    BINS: tl.constexpr,
    ROWS: tl.constexpr,
    PART: tl.constexpr,
):
    expert = tl.program_id(0)
    part, bins = tl.arange(0, PART), tl.arange(0, BINS)
    first, tiles = 0, 0  # numbers of tiles of earlier experts, and of this one
    for window in tl.static_range(0, EXPERTS, WINDOW):
        counts = tl.zeros([BINS], tl.int32)
        for begin in tl.range(0, choices, PART):
            number = tl.load(chosen + begin + part, mask=begin + part < choices, other=EXPERTS) - window
            is_within = (number >= 0) & (number < WINDOW) & (number < EXPERTS - window)
            counts += tl.histogram(tl.where(is_within, number, WINDOW).to(tl.int32), BINS)
        tiles_of = tl.where(bins < WINDOW, (counts + ROWS - 1) // ROWS, 0)
        first += tl.sum(tl.where(window + bins < expert, tiles_of, 0), 0)
        tiles += tl.sum(tl.where(window + bins == expert, tiles_of, 0), 0)
    if expert == EXPERTS:  # no expert: marks unused tiles
        for begin in tl.range(first, capacity, PART):
            tl.store(tile_experts + begin + part, tl.full([PART], -1, tl.int32), mask=begin + part < capacity)
    elif tiles > 0:
        seen = 0
        for begin in tl.range(0, choices, PART):
            at = begin + part
            is_ours = (tl.load(chosen + at, mask=at < choices, other=EXPERTS) == expert).to(tl.int32)
            row_index = seen + tl.cumsum(is_ours, 0) - 1
            tl.store(rows + first * ROWS + row_index, at, mask=is_ours > 0)
            seen += tl.sum(is_ours, 0)
        # Mark the unused rows of the last tile.
        padding_index = seen + tl.arange(0, ROWS)
        tl.store(
            rows + first * ROWS + padding_index,
            tl.zeros_like(padding_index) + choices,
            mask=padding_index < tiles * ROWS,
        )
        for begin in tl.range(0, tiles, PART):
            at = begin + part
            tl.store(tile_experts + first + at, tl.zeros_like(at) + expert, mask=at < tiles)


def max_tiles(choices: int, experts: int, tile_rows: int) -> int:
    """Return an upper bound of the number of tiles: each expert in use has at least one row in its last tile."""
    return (choices + min(choices, experts) * (tile_rows - 1)) // tile_rows


@operation("stoker::align")
def align(chosen: torch.Tensor, experts: int, tile_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort choices by expert into tiles of a single expert each.

    Args:
        chosen: [tokens, k] int64 expert indices; choices outside 0 … `experts` - 1 are in no tile.
        experts: number of experts, at least 1.
        tile_rows: rows of a tile; a power of two.

    Returns:
        [tiles × tile_rows] int32, indices into the flattened `chosen`, where the number of choices marks padding; and
        [tiles] int32, the expert of each tile. For unused tiles the expert is -1, and the choices are undefined.
    """
    choices = chosen.numel()
    tiles = max_tiles(choices, experts, tile_rows)
    rows = torch.empty(tiles * tile_rows, dtype=torch.int32, device=chosen.device)
    tile_experts = torch.empty(tiles, dtype=torch.int32, device=chosen.device)
    if choices:
        chosen = chosen.contiguous()
        _align[(experts + 1,)](
            chosen, rows, tile_experts, choices, tiles, **_constants(experts, tile_rows), num_warps=4
        )
    return rows, tile_experts


@align.register_fake
def _(chosen: torch.Tensor, experts: int, tile_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    tiles = max_tiles(chosen.numel(), experts, tile_rows)
    return (
        torch.empty(tiles * tile_rows, dtype=torch.int32, device=chosen.device),
        torch.empty(tiles, dtype=torch.int32, device=chosen.device),
    )


def _constants(experts: int, tile_rows: int) -> dict[str, object]:
    window = min(experts, _WINDOW)
    bins = max(16, triton.next_power_of_2(window + 1))
    return {"EXPERTS": experts, "WINDOW": window, "BINS": bins, "ROWS": tile_rows, "PART": _PART}


def kernel_variants(gpu: GpuTarget) -> Iterator[KernelVariant]:
    """See `attention.decode.kernel_variants`."""
    pointers = {"chosen": "i64", "rows": "i32", "tile_experts": "i32"}
    numbers = {"choices": "i32", "capacity": "i32"}
    for experts in (8, 256, 10_000):
        yield KernelVariant.of(f"align {experts}", _align, pointers, numbers, _constants(experts, 64))
