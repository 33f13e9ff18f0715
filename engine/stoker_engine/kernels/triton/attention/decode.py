"""Attention of decodes against the paged cache.

A decode has few rows and many keys. Therefore its keys are split into parts, computed by different programs
(Flash-Decoding: Dao et al., 2023; `decode_splits`). The one that finishes a sequence's last part joins the results in a
fixed order (`merge`), where this is faster than another launch. Parts begin at fixed positions, so a row has the same
bits in every batch.

One program computes neighbouring decodes, as many as fit into a tile, that have the same blocks in a part, and reads
the part once (cascade inference: Ye et al., 2024; Hydragen: Juravsky et al., 2024). This does not change a row's bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
import triton
import triton.language as tl

from stoker_engine.kernels.triton.attention.arguments import layer_arguments
from stoker_engine.kernels.triton.attention.decode_splits import PART_SIZES, part_begin
from stoker_engine.kernels.triton.attention.masks import oldest_visible
from stoker_engine.kernels.triton.attention.merge import PartResults, merge_head, merge_parts, parts_with_results
from stoker_engine.kernels.triton.attention.online_softmax import attend_to_keys, load_queries, tile_head
from stoker_engine.kernels.triton.attention.variants import layer_variants
from stoker_engine.kernels.triton.common.float8 import PLAIN
from stoker_engine.kernels.triton.common.gpu_target import GpuTarget
from stoker_engine.kernels.triton.common.kernel_variant import KernelVariant
from stoker_engine.kernels.triton.common.operation import operation

#: Maximum number of query heads of a KV head whose parts the decode kernel joins.
_MOST_MERGED: Final = 4
#: Arguments that change between steps, for which kernels must not be specialized.
_OF_A_STEP: Final = ["tables", "seq_lens", "part_starts", "part_sequences", "num_sequences", "table_row"]


@triton.jit
def _shares_part(  # type: ignore[no-untyped-def]
    candidates, length, begin, end, low, high, table, tables, table_row, SHAPE: tl.constexpr
):
    """Return which candidate decodes see the same range of a part's keys, in the same blocks, as a given decode.

    Args:
        candidates, length: [n] sequences, -1 for none, and their lengths.
        begin, end: keys of the part that the given decode sees.
        low, high: keys of the part.
        table: block table of the given decode.
    """
    oldest = tl.zeros_like(length) + oldest_visible(length - 1, SHAPE.window)
    shares = (candidates >= 0) & (tl.maximum(oldest, low) == begin) & (tl.minimum(length, high) == end)
    first_block = begin // SHAPE.block_size
    candidate_blocks = tl.load(tables + candidates * table_row + first_block, mask=shares, other=-1)
    shares = shares & (candidate_blocks == tl.load(table + first_block))
    if tl.sum(shares.to(tl.int32), 0) > 1:  # usually the first block decides
        for first in tl.range(first_block + 1, (end - 1) // SHAPE.block_size + 1, 32):
            block = first + tl.arange(0, 32)
            is_block = block * SHAPE.block_size < end
            own_blocks = tl.load(table + block, mask=is_block, other=0)[None, :]
            is_shared = shares[:, None] & is_block[None, :]
            later_blocks = tl.load(tables + candidates[:, None] * table_row + block[None, :], mask=is_shared, other=0)
            shares = shares & (tl.max(tl.where(is_shared & (later_blocks != own_blocks), 1, 0), 1) == 0)
    return shares


@triton.jit
def _merge_if_last(  # type: ignore[no-untyped-def]
    results, counters, sequence, seq_lens, part_starts, sinks, out, SHAPE: tl.constexpr, SIZES: tl.constexpr
):
    """Count a finished part of a sequence, for this program's heads. If it was the last one, merge all parts, and reset
    the counter for the next launch.

    Counting has acquire and release semantics: it publishes this part's results, and makes those of the parts counted
    before visible. The order in which parts finish does not change the result.
    """
    HEAD_TILES: tl.constexpr = (SHAPE.group + SHAPE.group_tile - 1) // SHAPE.group_tile
    first, end = parts_with_results(tl.load(seq_lens + sequence), SHAPE, SIZES)
    counter = counters + sequence * tl.num_programs(1) + tl.program_id(1)
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == end - first - 1:
        tl.debug_barrier()  # what one thread has acquired is visible to all
        tl.store(counter, 0)
        before = tl.load(part_starts + sequence)
        kv_head, first_head = tl.program_id(1) // HEAD_TILES, tl.program_id(1) % HEAD_TILES * SHAPE.group_tile
        for row in tl.static_range(SHAPE.group_tile):
            if first_head + row < SHAPE.group:
                head = kv_head * SHAPE.group + first_head + row
                merge_head(results, first, end, before, sequence, head, sinks, out, SHAPE)


@triton.jit(do_not_specialize=_OF_A_STEP)
def _decode_attention(  # type: ignore[no-untyped-def]
    queries,
    cache,
    scores,
    tables,
    seq_lens,
    part_starts,
    part_sequences,
    results,
    counters,
    out,
    num_sequences,
    table_row: tl.int64,
    SHAPE: tl.constexpr,
    SIZES: tl.constexpr,
):
    sequence = tl.load(part_sequences + tl.program_id(0))
    if sequence < 0:
        return
    # The last parts, which may be the longest, are computed first.
    split = tl.load(part_starts + sequence + 1) - 1 - tl.program_id(0)
    length = tl.load(seq_lens + sequence)
    table = tables + sequence * table_row

    # Range of the part's keys that the decode sees.
    oldest = oldest_visible(length - 1, SHAPE.window)
    low, high = part_begin(split, SIZES), part_begin(split + 1, SIZES)
    begin, end = tl.maximum(oldest // SHAPE.keys * SHAPE.keys, low), tl.minimum(length, high)
    if (begin >= end) & (length > 0):  # the padding of a CUDA graph has a result, too
        return

    rows = tl.arange(0, SHAPE.rows)
    kv_head, head, is_row = tile_head(rows, SHAPE)
    if SHAPE.queries > 1:
        token = sequence // SHAPE.queries * SHAPE.queries + rows // SHAPE.group_tile
        is_row = is_row & (token < num_sequences)
        row_length = tl.load(seq_lens + token, mask=is_row, other=0)
        at = row_length - 1
        candidates = tl.where(is_row, token, -1)
        is_row = is_row & _shares_part(
            candidates, row_length, tl.maximum(oldest, low), end, low, high, table, tables, table_row, SHAPE
        )
        if tl.min(tl.where(is_row, token, sequence), 0) < sequence:
            return  # the program of an earlier sequence computes this one's rows
    else:
        token, at = tl.zeros_like(rows) + sequence, tl.zeros_like(rows) + length - 1
    q_main, q_rest = load_queries(queries, token, head, is_row, SHAPE)
    slope = tl.zeros([SHAPE.rows], tl.float32)
    if scores.slopes is not None:
        slope = tl.load(scores.slopes + head, mask=is_row, other=0.0)

    top = tl.full([SHAPE.rows], float("-inf"), tl.float32)
    total = tl.zeros([SHAPE.rows], tl.float32)
    sums = tl.zeros([SHAPE.rows, SHAPE.value_padded], tl.float32)
    top, total, sums = attend_to_keys(
        top, total, sums, begin, end, end, oldest, q_main, q_rest, at, slope, table, cache, kv_head, scores, SHAPE, True
    )

    first_part = tl.load(part_starts + token, mask=is_row, other=0)
    part = (first_part + split).to(tl.int64) * SHAPE.num_heads + head
    tl.store(results.top + part, top, mask=is_row)
    tl.store(results.total + part, total, mask=is_row)
    dims = tl.arange(0, SHAPE.value_padded)
    is_element = is_row[:, None] & (dims < SHAPE.value_dim)[None, :]
    tl.store(results.sums + part[:, None] * SHAPE.value_dim + dims[None, :], sums, mask=is_element)

    if counters is not None:
        tl.debug_barrier()  # counting releases what all threads have stored, only if it happens after a barrier
        for computed in tl.range(sequence, tl.max(tl.where(is_row, token, sequence), 0) + 1):
            if tl.max((is_row & (token == computed)).to(tl.int32), 0) == 1:
                _merge_if_last(results, counters, computed, seq_lens, part_starts, scores.sinks, out, SHAPE, SIZES)


def merges_parts(group: int, code: int, gpu: GpuTarget) -> bool:
    """Return whether the decode kernel should join parts, in the program that finishes a sequence's last one. It joins
    its heads one after the other, so if there are many, a launch with a program for each is faster; with the registers
    that dequantization needs, it would spill. On AMD GPUs a barrier need not order the stores of a program's waves
    before an atomic operation of one of them.

    Args:
        group: query heads that share a KV head.
        code: storage format of the cache (`common.float8`).
    """
    return not gpu.is_amd and code == PLAIN and group <= _MOST_MERGED


@operation("stoker::decode_attention", mutates_args=("counters", "out"))
def decode_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
    tables: torch.Tensor,
    seq_lens: torch.Tensor,
    part_starts: torch.Tensor,
    part_sequences: torch.Tensor,
    counters: torch.Tensor | None,
    scale: float,
    sliding_window: int | None,
    logits_soft_cap: float | None,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Compute attention of decodes to cached keys. For other arguments see `attention.backend`.

    Args:
        query: [tokens, heads, head_dim], all tokens of the step; the decodes are the first ones.
        tables: [sequences, blocks] int32, block tables of the decodes.
        seq_lens: [sequences] int32; results of sequences of length 0 are 0.
        part_starts, part_sequences: results of `decode_splits`.
        counters: if the kernel joins the parts (`merges_parts`), [at least sequences × heads] int32, zeros before and
            after; calls that may overlap need their own. None: another launch joins them.
        out: [tokens, heads, value_head_dim]; only rows of the decodes are written.
    """
    layer = layer_arguments(
        query, key_cache, value_cache, key_scales, value_scales, scale, sliding_window, logits_soft_cap, alibi_slopes,
        sinks, are_decodes=True,
    )  # fmt: skip
    shape, num_parts = layer.shape, len(part_sequences)
    num_kv_heads = shape.num_heads // shape.group
    results = PartResults.empty(num_parts * shape.num_heads, shape.value_dim, query.device)
    _decode_attention[(num_parts, num_kv_heads * shape.head_tiles)](
        layer.queries,
        layer.cache,
        layer.scores,
        tables,
        seq_lens,
        part_starts,
        part_sequences,
        results,
        counters,
        out,
        len(seq_lens),
        tables.stride(0),
        SHAPE=shape,
        SIZES=PART_SIZES,
        num_warps=layer.tiles.warps,
        num_stages=layer.tiles.stages,
    )
    if counters is None:
        merge_parts(results, seq_lens, part_starts, sinks, out, shape)


@decode_attention.register_fake
def _(query: torch.Tensor, *_: object) -> None:
    pass


def kernel_variants(gpu: GpuTarget) -> Iterator[KernelVariant]:
    """Yield the variants of this file's kernel that common models need, for ahead-of-time compilation."""
    yield from layer_variants(
        "attention decode",
        _decode_attention,
        are_decodes=True,
        gpu=gpu,
        tuples={"results": PartResults("*fp32", "*fp32", "*fp32")},
        constants=lambda shape: (
            {"SIZES": PART_SIZES} | ({} if merges_parts(shape.group, shape.code, gpu) else {"counters": None})
        ),
    )
