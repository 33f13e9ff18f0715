"""Shrink: x Aᵀ with the A of each row's adapter, in the tiles of `tiles.group`.

One program computes a tile (rows × ranks) of one part (see `kernels.lora`), over `SPLIT` inner elements in steps of a
fixed size. Programs of unused tiles, and of ranks that the adapter does not have, return immediately.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from stoker_engine.kernels.triton.common.arithmetic import dot
from stoker_engine.kernels.triton.common.gpu_target import GpuTarget
from stoker_engine.kernels.triton.common.kernel_variant import KernelVariant
from stoker_engine.kernels.triton.common.operation import operation
from stoker_engine.kernels.triton.lora.tiles import SPLIT, num_splits, step_of, tile_ranks, tile_rows


@triton.jit(do_not_specialize=["count", "parts", "splits"])
def _lora_shrink(  # type: ignore[no-untyped-def]
    x,
    a,
    ranks,
    rows,
    tile_slots,
    out,
    count,
    parts,
    splits,
    inner: tl.int64,
    x_row: tl.int64,
    x_head: tl.int64,
    a_slot: tl.int64,
    a_part: tl.int64,
    a_head: tl.int64,
    MAX_RANK: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    SPLIT: tl.constexpr,
    STEP: tl.constexpr,
):
    tile = tl.program_id(0)
    slot = tl.load(tile_slots + tile).to(tl.int64)
    if slot < 0:
        return
    split, head = tl.program_id(1), tl.program_id(2)
    RANK_TILES: tl.constexpr = (MAX_RANK + RANKS - 1) // RANKS
    part = (split // RANK_TILES) % parts
    rank = (split % RANK_TILES) * RANKS + tl.arange(0, RANKS)
    split = split // RANK_TILES // parts
    # Elements beyond the adapter's rank may be left over from an earlier adapter in the slot.
    is_rank = rank < tl.load(ranks + slot * parts + part)
    if tl.max(is_rank.to(tl.int32), 0) == 0:
        return
    row = tl.load(rows + tile * ROWS + tl.arange(0, ROWS))
    is_row = row < count
    of_row = x + row.to(tl.int64) * x_row + head.to(tl.int64) * x_head
    of_rank = a + slot * a_slot + part * a_part + head * a_head + rank.to(tl.int64) * inner
    sums = tl.zeros([ROWS, RANKS], tl.float32)
    begin = split.to(tl.int64) * SPLIT
    for start in tl.range(begin, tl.minimum(begin + SPLIT, inner), STEP):
        at = start + tl.arange(0, STEP)
        is_inner = at < inner
        inputs = tl.load(of_row[:, None] + at[None, :], mask=is_row[:, None] & is_inner[None, :], other=0.0)
        matrix = tl.load(of_rank[None, :] + at[:, None], mask=is_rank[None, :] & is_inner[:, None], other=0.0)
        sums += dot(inputs, matrix)
    index = (row.to(tl.int64) * tl.num_programs(2) + head) * splits + split
    to = out + ((index * parts + part) * MAX_RANK)[:, None] + rank[None, :]
    tl.store(to, sums, mask=is_row[:, None] & is_rank[None, :])


@operation("stoker::lora_shrink")
def lora_shrink(
    x: torch.Tensor, a: torch.Tensor, ranks: torch.Tensor, rows: torch.Tensor, tile_slots: torch.Tensor
) -> torch.Tensor:
    """See `GroupedLora.shrink`."""
    count, heads, inner = x.shape
    _, parts, own_heads, max_rank, _ = a.shape
    splits = num_splits(inner)
    out = torch.empty((count, heads, splits, parts, max_rank), dtype=torch.float32, device=x.device)
    if not out.numel():
        return out
    assert x.dtype == a.dtype and own_heads in (1, heads) and a.is_contiguous() and ranks.is_contiguous()
    x = x if x.stride(2) == 1 else x.contiguous()
    tile_of_ranks = tile_ranks(max_rank, a.dtype)
    _lora_shrink[(len(tile_slots), splits * parts * triton.cdiv(max_rank, tile_of_ranks), heads)](
        x,
        a,
        ranks,
        rows,
        tile_slots,
        out,
        count,
        parts,
        splits,
        inner,
        x.stride(0),
        x.stride(1) if heads > 1 else 0,
        *a.stride()[:2],
        a.stride(2) if own_heads > 1 else 0,
        MAX_RANK=max_rank,
        ROWS=tile_rows(a.dtype),
        RANKS=tile_of_ranks,
        SPLIT=SPLIT,
        STEP=step_of(a.dtype),
        num_warps=4,
        num_stages=_stages(torch.version.hip is not None),
    )
    return out


@lora_shrink.register_fake
def _(
    x: torch.Tensor, a: torch.Tensor, ranks: torch.Tensor, rows: torch.Tensor, tile_slots: torch.Tensor
) -> torch.Tensor:
    shape = *x.shape[:2], num_splits(x.shape[2]), a.shape[1], a.shape[3]
    return torch.empty(shape, dtype=torch.float32, device=x.device)


def _stages(is_amd: bool) -> int:
    return 2 if is_amd else 3


def kernel_variants(gpu: GpuTarget) -> Iterator[KernelVariant]:
    """See `attention.decode.kernel_variants`."""
    for name, max_rank in (("bf16", 16), ("bf16", 64), ("bf16", 256), ("fp16", 32), ("fp32", 16), ("fp32", 64)):
        dtype = torch.float32 if name == "fp32" else torch.bfloat16
        constants = {
            "MAX_RANK": max_rank,
            "ROWS": tile_rows(dtype),
            "RANKS": tile_ranks(max_rank, dtype),
            "SPLIT": SPLIT,
            "STEP": step_of(dtype),
        }
        pointers = {"x": name, "a": name, "ranks": "i32", "rows": "i32", "tile_slots": "i32", "out": "fp32"}
        yield KernelVariant.of(
            f"lora_shrink {max_rank} {name}",
            _lora_shrink,
            pointers,
            dict.fromkeys(("count", "parts", "splits"), "i32"),
            constants,
            stages=_stages(gpu.is_amd),
            tensor_cores=name != "fp32",
        )
