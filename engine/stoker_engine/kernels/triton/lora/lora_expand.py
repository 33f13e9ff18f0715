"""Expand: y += (x Aᵀ) Bᵀ with the B of each row's adapter, from results of `lora_shrink` and tiles of `tiles.group`.

One program computes a tile (rows × outputs) of one part (see `kernels.lora`). The partial sums of shrink are added in
order and rounded to B's dtype; their products with B are accumulated in float32, added to y, and rounded once. Programs
of unused tiles, and of parts that the adapter does not change, return immediately.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from stoker_engine.kernels.triton.common.arithmetic import dot, rounded, widened
from stoker_engine.kernels.triton.common.gpu_target import GpuTarget
from stoker_engine.kernels.triton.common.kernel_variant import KernelVariant
from stoker_engine.kernels.triton.common.operation import operation
from stoker_engine.kernels.triton.lora.tiles import tile_outputs, tile_ranks, tile_rows


@triton.jit(do_not_specialize=["count", "parts", "splits"])
def _lora_expand(  # type: ignore[no-untyped-def]
    y,
    shrunk,
    b,
    ranks,
    output_tiles,
    rows,
    tile_slots,
    count,
    parts,
    splits,
    y_row: tl.int64,
    y_head: tl.int64,
    b_slot: tl.int64,
    b_head: tl.int64,
    MAX_RANK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANKS: tl.constexpr,
):
    tile = tl.program_id(0)
    slot = tl.load(tile_slots + tile).to(tl.int64)
    if slot < 0:
        return
    outputs, head = output_tiles + tl.program_id(1) * 4, tl.program_id(2).to(tl.int64)
    part = tl.load(outputs + 2)
    used = tl.load(ranks + slot * parts + part)
    if used == 0:
        return
    output = tl.load(outputs) + tl.arange(0, COLUMNS)
    is_output = output < tl.load(outputs + 1)
    row = tl.load(rows + tile * ROWS + tl.arange(0, ROWS))
    is_row = row < count
    of_row = shrunk + ((row.to(tl.int64) * tl.num_programs(2) + head) * splits * parts + part) * MAX_RANK
    of_output = b + slot * b_slot + head * b_head + (output + tl.load(outputs + 3)).to(tl.int64) * MAX_RANK
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in tl.range(0, used, RANKS):
        rank = begin + tl.arange(0, RANKS)
        is_rank = rank < used
        is_shrunk = is_row[:, None] & is_rank[None, :]
        inner = tl.zeros([ROWS, RANKS], tl.float32)
        for split in tl.range(0, splits):
            at = of_row + split * parts * MAX_RANK
            inner += tl.load(at[:, None] + rank[None, :], mask=is_shrunk, other=0.0)
        matrix = tl.load(of_output[None, :] + rank[:, None], mask=is_output[None, :] & is_rank[:, None], other=0.0)
        sums += dot(rounded(inner, b.dtype.element_ty), matrix)
    to = y + row.to(tl.int64)[:, None] * y_row + head * y_head + output[None, :]
    is_result = is_row[:, None] & is_output[None, :]
    sums += widened(tl.load(to, mask=is_result, other=0.0))
    tl.store(to, rounded(sums, y.dtype.element_ty), mask=is_result)


@operation("stoker::lora_expand", mutates_args=["y"])
def lora_expand(
    y: torch.Tensor,
    shrunk: torch.Tensor,
    b: torch.Tensor,
    ranks: torch.Tensor,
    output_tiles: torch.Tensor,
    rows: torch.Tensor,
    tile_slots: torch.Tensor,
) -> None:
    """See `GroupedLora.expand`."""
    count, heads, _ = y.shape
    _, _, splits, parts, max_rank = shrunk.shape
    own_heads = b.shape[1]
    if not y.numel() or not len(output_tiles):
        return
    assert y.stride(2) == 1 and own_heads in (1, heads)
    assert all(tensor.is_contiguous() for tensor in (shrunk, b, ranks, output_tiles))
    _lora_expand[(len(tile_slots), len(output_tiles), heads)](
        y,
        shrunk,
        b,
        ranks,
        output_tiles,
        rows,
        tile_slots,
        count,
        parts,
        splits,
        y.stride(0),
        y.stride(1) if heads > 1 else 0,
        b.stride(0),
        b.stride(1) if own_heads > 1 else 0,
        MAX_RANK=max_rank,
        ROWS=tile_rows(b.dtype),
        COLUMNS=tile_outputs(b.dtype),
        RANKS=tile_ranks(max_rank, b.dtype),
        num_warps=4,
        num_stages=2,
    )


@lora_expand.register_fake
def _(
    y: torch.Tensor,
    shrunk: torch.Tensor,
    b: torch.Tensor,
    ranks: torch.Tensor,
    output_tiles: torch.Tensor,
    rows: torch.Tensor,
    tile_slots: torch.Tensor,
) -> None:
    pass


def kernel_variants(gpu: GpuTarget) -> Iterator[KernelVariant]:
    """See `attention.decode.kernel_variants`."""
    for y, name, max_rank in (
        ("bf16", "bf16", 16),
        ("bf16", "bf16", 64),
        ("bf16", "bf16", 256),
        ("fp32", "bf16", 16),
        ("fp16", "fp16", 32),
        ("fp32", "fp32", 16),
        ("fp32", "fp32", 64),
    ):
        dtype = torch.float32 if name == "fp32" else torch.bfloat16
        constants = {
            "MAX_RANK": max_rank,
            "ROWS": tile_rows(dtype),
            "COLUMNS": tile_outputs(dtype),
            "RANKS": tile_ranks(max_rank, dtype),
        }
        pointers = dict.fromkeys(("ranks", "output_tiles", "rows", "tile_slots"), "i32")
        yield KernelVariant.of(
            " ".join(filter(None, (f"lora_expand {max_rank} {name}", "wide" if y != name else ""))),
            _lora_expand,
            pointers | {"y": y, "shrunk": "fp32", "b": name},
            dict.fromkeys(("count", "parts", "splits"), "i32"),
            constants,
            tensor_cores=name != "fp32",
        )
