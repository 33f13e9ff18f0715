"""Which rows each expert computes, in tiles of a fixed number of rows.

    choices         t0: e2 e0   t1: e2 e3   t2: e0 e2       numbered 0 … 5, token by token
    tiles of 4      1 4 – –     0 2 5 –     3 – – –
    their experts   0           2           3           none, none, …

So many tiles are made as there could be at most; those beyond the real ones have no expert. A program has an expert: it
counts the choices of all, which says where its own tiles begin, and then puts its choices there, in their order.
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
#: Experts that are counted at once.
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
    first, tiles = 0, 0  # before it, and its own
    for window in tl.static_range(0, EXPERTS, WINDOW):
        counts = tl.zeros([BINS], tl.int32)
        for begin in tl.range(0, choices, PART):
            number = tl.load(chosen + begin + part, mask=begin + part < choices, other=EXPERTS) - window
            is_within = (number >= 0) & (number < WINDOW) & (number < EXPERTS - window)
            counts += tl.histogram(tl.where(is_within, number, WINDOW).to(tl.int32), BINS)
        tiles_of = tl.where(bins < WINDOW, (counts + ROWS - 1) // ROWS, 0)
        first += tl.sum(tl.where(window + bins < expert, tiles_of, 0), 0)
        tiles += tl.sum(tl.where(window + bins == expert, tiles_of, 0), 0)
    if expert == EXPERTS:  # no expert: fills the remaining tiles
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
        # The last tile's other rows are none.
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
    """How many tiles there could be: an expert in use leaves at most all rows but one of its last tile empty."""
    return (choices + min(choices, experts) * (tile_rows - 1)) // tile_rows


@operation("stoker::align")
def align(chosen: torch.Tensor, experts: int, tile_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sorts choices by expert, into tiles that each belong to one expert.

    Args:
        chosen: [tokens, k] int64 expert numbers. Those from `experts` on are others', and are in no tile; nor are those
            below 0.
        experts: how many there are, 1 at least.
        tile_rows: of a tile; a power of two.

    Returns:
        [tiles × tile_rows] int32 choices, which are numbered through `chosen`; as many as there are choices: none; and
        [tiles] int32 experts; -1: the tile is not used, and nothing is written where its choices would be.
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
    """See `attention.kernel_variants`."""
    pointers = {"chosen": "i64", "rows": "i32", "tile_experts": "i32"}
    numbers = {"choices": "i32", "capacity": "i32"}
    for experts in (8, 256, 10_000):
        yield KernelVariant.of(f"align {experts}", _align, pointers, numbers, _constants(experts, 64))
