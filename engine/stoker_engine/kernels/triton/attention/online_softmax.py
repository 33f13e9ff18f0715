"""Attention of a tile of queries to a range of keys of one sequence, in the paged cache.

A tile has the queries of one or several tokens for query heads that share a KV head, and reads each key once. It keeps
each row's largest score and sum of weights (online softmax: Milakov & Gimelshein, 2018; FlashAttention-2: Dao, 2023):

    rows of a tile      q0h0 q0h1 q1h0 q1h1 …        keys of a tile     k0 … k63, from any blocks
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from stoker_engine.kernels.triton.attention.masks import is_visible
from stoker_engine.kernels.triton.common.arithmetic import dot, rounded
from stoker_engine.kernels.triton.common.float8 import decode

LOG2_E: Final = tl.constexpr(1.4426950408889634)


@triton.jit
def tile_head(rows, SHAPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the KV head of this program, its rows' query heads, and which of the rows have one."""
    HEAD_TILES: tl.constexpr = (SHAPE.group + SHAPE.group_tile - 1) // SHAPE.group_tile
    kv_head, head_tile = tl.program_id(1) // HEAD_TILES, tl.program_id(1) % HEAD_TILES
    in_group = head_tile * SHAPE.group_tile + rows % SHAPE.group_tile
    has_head = (rows < SHAPE.queries * SHAPE.group_tile) & (in_group < SHAPE.group)
    return kv_head, kv_head * SHAPE.group + in_group, has_head


@triton.jit
def load_queries(queries, token, head, is_row, SHAPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load a tile's queries: their first `head_main` elements, and the others."""
    main = tl.arange(0, SHAPE.head_main)
    tail = SHAPE.head_main + tl.arange(0, SHAPE.head_rest if SHAPE.head_rest > 0 else 16)
    row = queries.data + token.to(tl.int64)[:, None] * queries.token + head[:, None] * queries.head
    q_main = tl.load(row + main[None, :], mask=is_row[:, None] & (main < SHAPE.head_dim)[None, :], other=0.0)
    q_rest = q_main
    if SHAPE.head_rest > 0:
        q_rest = tl.load(row + tail[None, :], mask=is_row[:, None] & (tail < SHAPE.head_dim)[None, :], other=0.0)
    return q_main, q_rest


@triton.jit
def score_factor(scores):  # type: ignore[no-untyped-def]
    """Return the positive factor of scores by which `attend_to_keys` computes weights: 2^(score × factor). It is
    applied by the FMA that subtracts the largest score."""
    if scores.soft_cap is not None or scores.slopes is not None:
        return LOG2_E
    else:
        return scores.scale * LOG2_E


@triton.jit
def paged_at(paged, block, slot, kv_head):  # type: ignore[no-untyped-def]
    """Return pointers to tokens of a KV head in a tensor of the cache."""
    slot_stride, head_stride = tl.cast(paged.slot, tl.int64), tl.cast(paged.head, tl.int64)
    return paged.data + block * paged.block + slot * slot_stride + kv_head * head_stride


@triton.jit
def attend_to_keys(  # type: ignore[no-untyped-def]
    top, total, sums, begin, end, last, oldest, q_main, q_rest, at, slope, table, cache, kv_head, scores,
    SHAPE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Compute attention of a tile's queries to the keys from `begin` to `end`.

    Args:
        top, total, sums: each row's largest score × `score_factor` so far; sums, relative to it, of weights and of
            weighted values.
        last, oldest: exclusive upper bound, and lower bound, of the keys that any query sees.
        q_main, q_rest: see `load_queries`.
        at, slope: [rows] positions of the queries, and their ALiBi slopes.
        table: the sequence's block table.
        MASKED: whether some query may not see some key.
    """
    main = tl.arange(0, SHAPE.head_main)
    tail = SHAPE.head_main + tl.arange(0, SHAPE.head_rest if SHAPE.head_rest > 0 else 16)
    dims = tl.arange(0, SHAPE.value_padded)
    DTYPE: tl.constexpr = q_main.dtype
    SCALED: tl.constexpr = cache.key_scale is not None
    # The product of a weight and a scale may underflow in float16, so values are scaled instead of weights.
    SCALES_VALUES: tl.constexpr = SCALED and DTYPE == tl.float16
    factor = score_factor(scores)
    for tile_begin in tl.range(begin, end, SHAPE.keys):
        key_at = tile_begin + tl.arange(0, SHAPE.keys)
        is_key = tl.full([SHAPE.keys], True, tl.int1)
        if MASKED:  # keys that no query sees are not read
            is_key = (key_at < last) & (key_at >= oldest)
        block = tl.load(table + key_at // SHAPE.block_size, mask=is_key, other=0).to(tl.int64)
        slot = key_at % SHAPE.block_size
        of_key = paged_at(cache.key, block, slot, kv_head)
        stored = tl.load(
            of_key[None, :] + main[:, None], mask=is_key[None, :] & (main < SHAPE.head_dim)[:, None], other=0
        )
        score = dot(q_main, decode(stored, SHAPE.code, DTYPE))
        if SHAPE.head_rest > 0:
            stored = tl.load(
                of_key[None, :] + tail[:, None], mask=is_key[None, :] & (tail < SHAPE.head_dim)[:, None], other=0
            )
            score += dot(q_rest, decode(stored, SHAPE.code, DTYPE))
        if SCALED:
            key_scale = tl.load(paged_at(cache.key_scale, block, slot, kv_head), mask=is_key, other=0.0)
            score *= key_scale[None, :]
        if scores.soft_cap is not None:
            bent = 2 * tl.sigmoid(2 * (score * scores.scale) / scores.soft_cap) - 1  # tanh
            score = scores.soft_cap * bent
        distance = key_at[None, :] - at[:, None]
        if scores.slopes is not None:
            score = (score if scores.soft_cap is not None else score * scores.scale) + slope[:, None] * distance
        if MASKED:
            score = tl.where(is_key[None, :] & is_visible(distance, SHAPE.window), score, float("-inf"))

        new_top = tl.maximum(top, tl.max(score, 1) * factor)
        # A row that has seen no key yet has no largest score; 0 avoids -inf - (-inf).
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        # Explicit FMA: otherwise the compiler fuses only the unmasked path, and results depend on the chunking.
        weights = tl.exp2(tl.fma(score, factor, -base[:, None]))
        faded = tl.exp2(top - base)
        total = total * faded + tl.sum(weights, 1)
        if SCALED:
            value_scale = tl.load(paged_at(cache.value_scale, block, slot, kv_head), mask=is_key, other=0.0)
            if not SCALES_VALUES:
                weights *= value_scale[None, :]
        of_value = paged_at(cache.value, block, slot, kv_head)
        stored = tl.load(
            of_value[:, None] + dims[None, :], mask=is_key[:, None] & (dims < SHAPE.value_dim)[None, :], other=0
        )
        sums *= faded[:, None]
        if SCALES_VALUES:
            value = rounded(decode(stored, SHAPE.code, tl.float32) * value_scale[:, None], DTYPE)
        else:
            value = decode(stored, SHAPE.code, DTYPE)
        sums += dot(rounded(weights, DTYPE), value)
        top = new_top
    return top, total, sums


@triton.jit
def with_sink(sums, total, top, sink):  # type: ignore[no-untyped-def]
    """Add the attention sink, a score without a value, after all keys."""
    sink *= LOG2_E
    new_top = tl.maximum(top, sink)
    faded = tl.exp2(top - new_top)
    return sums * faded[:, None], total * faded + tl.exp2(sink - new_top)
