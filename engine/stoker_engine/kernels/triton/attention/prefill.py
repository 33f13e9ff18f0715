"""Causal attention of prompts' chunks against the paged cache.

One program computes a tile of queries of one sequence, for the heads that share a KV head (up to a tile's rows), and
iterates over the keys that any of its queries sees (`online_softmax`). The grid is tiles of queries × tiles of heads;
programs find their tiles on the device (`_tile_of`), so the host passes only the step's metadata.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
import triton
import triton.language as tl

from stoker_engine.kernels.triton.attention.arguments import layer_arguments
from stoker_engine.kernels.triton.attention.masks import oldest_visible
from stoker_engine.kernels.triton.attention.online_softmax import attend_to_keys, load_queries, tile_head, with_sink
from stoker_engine.kernels.triton.attention.variants import layer_variants
from stoker_engine.kernels.triton.common.arithmetic import rounded
from stoker_engine.kernels.triton.common.gpu_target import GpuTarget
from stoker_engine.kernels.triton.common.kernel_variant import KernelVariant
from stoker_engine.kernels.triton.common.operation import operation

#: Arguments that change between steps, for which kernels must not be specialized.
_OF_A_STEP: Final = ["tables", "query_starts", "seq_lens", "num_sequences", "table_row"]


@triton.jit
def _tile_of(tile, query_starts, num_sequences, QUERIES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the sequence of a tile of queries, and the tile's first query in it.

    The tiles of sequence s start at index query_starts[s] // QUERIES + s; its last one may be unused.
    """
    low, high = 0, num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_starts + middle) // QUERIES + middle <= tile:
            low = middle
        else:
            high = middle
    return low, (tile - (tl.load(query_starts + low) // QUERIES + low)) * QUERIES


def _num_tiles(num_tokens: int, num_sequences: int, queries: int) -> int:
    """Return an upper bound of the number of tiles, see `_tile_of`."""
    return num_tokens // queries + num_sequences


@triton.jit(do_not_specialize=_OF_A_STEP)
def _prefill_attention(  # type: ignore[no-untyped-def]
    queries,
    cache,
    scores,
    tables,
    query_starts,
    seq_lens,
    out,
    num_sequences,
    table_row: tl.int64,
    SHAPE: tl.constexpr,
):
    sequence, first_query = _tile_of(tl.program_id(0), query_starts, num_sequences, SHAPE.queries)
    start = tl.load(query_starts + sequence)
    num_queries = tl.load(query_starts + sequence + 1) - start
    if (first_query < 0) | (first_query >= num_queries):
        return
    length = tl.load(seq_lens + sequence)
    table = tables + sequence * table_row

    # Range of keys that any of the tile's queries sees.
    first_at = length - num_queries + first_query
    oldest = oldest_visible(first_at, SHAPE.window)
    begin, end = oldest // SHAPE.keys * SHAPE.keys, tl.minimum(first_at + SHAPE.queries, length)

    rows = tl.arange(0, SHAPE.rows)
    kv_head, head, is_row = tile_head(rows, SHAPE)
    query = first_query + rows // SHAPE.group_tile
    is_row = is_row & (query < num_queries)
    token, at = start + query, length - num_queries + query
    q_main, q_rest = load_queries(queries, token, head, is_row, SHAPE)
    slope = tl.zeros([SHAPE.rows], tl.float32)
    if scores.slopes is not None:
        slope = tl.load(scores.slopes + head, mask=is_row, other=0.0)

    top = tl.full([SHAPE.rows], float("-inf"), tl.float32)
    total = tl.zeros([SHAPE.rows], tl.float32)
    sums = tl.zeros([SHAPE.rows, SHAPE.value_padded], tl.float32)
    # Keys that all queries of the tile see need no mask.
    seen_by_all = begin
    if SHAPE.unmasked and SHAPE.window == 0:
        seen_by_all = (first_at + 1) // SHAPE.keys * SHAPE.keys
        top, total, sums = attend_to_keys(
            top, total, sums, begin, seen_by_all, end, oldest, q_main, q_rest, at, slope, table, cache, kv_head, scores,
            SHAPE, False,
        )  # fmt: skip
    top, total, sums = attend_to_keys(
        top, total, sums, seen_by_all, end, end, oldest, q_main, q_rest, at, slope, table, cache, kv_head, scores,
        SHAPE, True,
    )  # fmt: skip

    if scores.sinks is not None:
        sums, total = with_sink(sums, total, top, tl.load(scores.sinks + head, mask=is_row, other=0.0))
    result = rounded(sums / tl.where(total == 0.0, 1.0, total)[:, None], out.dtype.element_ty)  # 0 without keys
    dims = tl.arange(0, SHAPE.value_padded)
    row_out = token.to(tl.int64) * SHAPE.num_heads + head
    is_element = is_row[:, None] & (dims < SHAPE.value_dim)[None, :]
    tl.store(out + row_out[:, None] * SHAPE.value_dim + dims[None, :], result, mask=is_element)


@operation("stoker::prefill_attention", mutates_args=("out",))
def prefill_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
    tables: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    sliding_window: int | None,
    logits_soft_cap: float | None,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Compute attention of some sequences' queries to cached keys. For other arguments see `attention.backend`.

    Args:
        query: [tokens, heads, head_dim], all tokens of the step.
        tables: [sequences, blocks] int32, block tables of the given sequences.
        query_starts: [sequences + 1] int32, first rows of the sequences in `query` and `out`, and the end.
        seq_lens: [sequences] int32; results of sequences of length 0 are 0.
        out: [tokens, heads, value_head_dim]; only rows of the given sequences are written.
    """
    layer = layer_arguments(
        query, key_cache, value_cache, key_scales, value_scales, scale, sliding_window, logits_soft_cap, alibi_slopes,
        sinks, are_decodes=False,
    )  # fmt: skip
    shape, num_sequences = layer.shape, len(seq_lens)
    num_kv_heads = shape.num_heads // shape.group
    _prefill_attention[(_num_tiles(len(query), num_sequences, shape.queries), num_kv_heads * shape.head_tiles)](
        layer.queries,
        layer.cache,
        layer.scores,
        tables,
        query_starts,
        seq_lens,
        out,
        num_sequences,
        tables.stride(0),
        SHAPE=shape,
        num_warps=layer.tiles.warps,
        num_stages=layer.tiles.stages,
    )


@prefill_attention.register_fake
def _(query: torch.Tensor, *_: object) -> None:
    pass


def kernel_variants(gpu: GpuTarget) -> Iterator[KernelVariant]:
    """Yield the variants of this file's kernel that common models need, for ahead-of-time compilation."""
    yield from layer_variants("attention chunk", _prefill_attention, are_decodes=False, gpu=gpu)
