"""Causal attention against the paged cache, for decodes and prefill chunks.

One program computes a tile of queries of one sequence, for the heads that share a KV head (up to a tile's rows), and
reads each key once. It iterates over the keys that any of its queries sees, and keeps each row's largest score and sum
of weights (online softmax: Milakov & Gimelshein, 2018; FlashAttention-2: Dao, 2023):

    rows of a tile      q0h0 q0h1 q1h0 q1h1 …        keys of a tile     k0 … k63, from any blocks
    grid                (tiles of queries, or parts of decodes) × (KV heads × tiles of their heads)

A decode has few rows and many keys. Therefore its keys are split into parts of a fixed size, computed by different
programs (Flash-Decoding: Dao et al., 2023; `decode_splits`), and a second kernel merges the parts in order. The split
depends only on the sequence's length, so a row has the same bits in every batch.

One program computes neighbouring decodes, as many as fit into a tile, that have the same blocks in a part, and reads
the part once (cascade inference: Ye et al., 2024; Hydragen: Juravsky et al., 2024). This does not change a row's bits.

Programs find their tiles on the device (`_sequence_of`), so the host passes only the step's metadata.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
import triton
import triton.language as tl

from stoker_engine.kernels.triton.attention.attention_tiles import Tiles, tiles_of
from stoker_engine.kernels.triton.common.arithmetic import dot, rounded
from stoker_engine.kernels.triton.common.float8 import E4M3, E5M2, INT8, PLAIN, code_of, decode, stored_bytes
from stoker_engine.kernels.triton.common.gpu_target import GpuTarget, gpu_target_of
from stoker_engine.kernels.triton.common.kernel_variant import KernelVariant
from stoker_engine.kernels.triton.common.operation import operation

#: Constants that `_merge_splits` also needs.
_JOINED: Final = ("NUM_HEADS", "VALUE", "VALUE_PADDED", "KEYS", "WINDOW", "SINKS", "SPLIT_KEYS")
_LOG2_E: Final = tl.constexpr(1.4426950408889634)


@triton.jit
def _sequence_of(tile, query_starts, num_sequences, QUERIES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the sequence of a tile of queries.

    The tiles of sequence s start at index query_starts[s] // QUERIES + s; its last one may be unused.
    """
    low, high = 0, num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_starts + middle) // QUERIES + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _shares_part(  # type: ignore[no-untyped-def]
    candidates, length, begin, end, low, high, table, tables, seq_lens, table_row,
    BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Return which candidate decodes see the same range of a part's keys, in the same blocks, as a given decode.

    Args:
        candidates, length: [n] sequences, -1 for none, and their lengths.
        begin, end: keys of the part that the given decode sees.
        low, high: keys of the part.
        table: block table of the given decode.
    """
    oldest = tl.zeros_like(length)
    if WINDOW > 0:
        oldest = tl.maximum(length - WINDOW, 0)
    shares = (candidates >= 0) & (tl.maximum(oldest, low) == begin) & (tl.minimum(length, high) == end)
    first_block = begin // BLOCK_SIZE
    candidate_blocks = tl.load(tables + candidates * table_row + first_block, mask=shares, other=-1)
    shares = shares & (candidate_blocks == tl.load(table + first_block))
    if tl.sum(shares.to(tl.int32), 0) > 1:  # usually the first block decides
        for first in tl.range(first_block + 1, (end - 1) // BLOCK_SIZE + 1, 32):
            block = first + tl.arange(0, 32)
            is_block = block * BLOCK_SIZE < end
            own_blocks = tl.load(table + block, mask=is_block, other=0)[None, :]
            is_shared = shares[:, None] & is_block[None, :]
            later_blocks = tl.load(tables + candidates[:, None] * table_row + block[None, :], mask=is_shared, other=0)
            shares = shares & (tl.max(tl.where(is_shared & (later_blocks != own_blocks), 1, 0), 1) == 0)
    return shares


@triton.jit
def _attention_inner(  # type: ignore[no-untyped-def]
    top, total, sums, begin, end, last, oldest, q_main, q_rest, at, slope, table, keys, values, key_scales,
    value_scales, kv_head, scale, soft_cap, key_block, key_slot, key_head, value_block, value_slot, value_head,
    scale_block, scale_slot, scale_head, value_scale_block, value_scale_slot, value_scale_head, factor,
    HEAD: tl.constexpr, HEAD_MAIN: tl.constexpr, HEAD_REST: tl.constexpr, VALUE: tl.constexpr,
    VALUE_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr,
    CODE: tl.constexpr, SCALED: tl.constexpr, ALIBI: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Compute attention of a tile's queries to the keys from `begin` to `end`.

    Args:
        top, total, sums: each row's largest score × `factor` so far; sums, relative to it, of weights and of weighted
            values.
        last, oldest: exclusive upper bound, and lower bound, of the keys that any query sees.
        q_main, q_rest: queries' first HEAD_MAIN elements, and the others.
        at: [rows] positions of the queries.
        table: the sequence's block table.
        factor: positive factor of scores: weights are 2^(score × factor).
        MASKED: whether some query may not see some key.
    """
    main, tail = tl.arange(0, HEAD_MAIN), HEAD_MAIN + tl.arange(0, HEAD_REST if HEAD_REST > 0 else 16)
    dims = tl.arange(0, VALUE_PADDED)
    DTYPE: tl.constexpr = q_main.dtype
    # The product of a weight and a scale may underflow in float16, so values are scaled instead of weights.
    SCALES_VALUES: tl.constexpr = SCALED and DTYPE == tl.float16
    for tile_begin in tl.range(begin, end, KEYS):
        key_at = tile_begin + tl.arange(0, KEYS)
        is_key = tl.full([KEYS], True, tl.int1)
        if MASKED:  # keys that no query sees are not read
            is_key = (key_at < last) & (key_at >= oldest)
        block = tl.load(table + key_at // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        slot = key_at % BLOCK_SIZE
        of_key = keys + block * key_block + slot * key_slot + kv_head * key_head
        stored = tl.load(of_key[None, :] + main[:, None], mask=is_key[None, :] & (main < HEAD)[:, None], other=0)
        scores = dot(q_main, decode(stored, CODE, DTYPE))
        if HEAD_REST > 0:
            stored = tl.load(of_key[None, :] + tail[:, None], mask=is_key[None, :] & (tail < HEAD)[:, None], other=0)
            scores += dot(q_rest, decode(stored, CODE, DTYPE))
        if SCALED:
            of_scale = block * scale_block + slot * scale_slot + kv_head * scale_head
            scores *= tl.load(key_scales + of_scale, mask=is_key, other=0.0)[None, :]
        if CAPPED:
            bent = 2 * tl.sigmoid(2 * (scores * scale) / soft_cap) - 1  # tanh
            scores = soft_cap * bent
        distance = key_at[None, :] - at[:, None]
        if ALIBI:
            scores = (scores if CAPPED else scores * scale) + slope[:, None] * distance
        if MASKED:
            sees = is_key[None, :] & (distance <= 0)
            if WINDOW > 0:
                sees = sees & (distance > -WINDOW)
            scores = tl.where(sees, scores, float("-inf"))

        new_top = tl.maximum(top, tl.max(scores, 1) * factor)
        # A row that has seen no key yet has no largest score; 0 avoids -inf - (-inf).
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        # Explicit FMA: otherwise the compiler fuses only the unmasked path, and results depend on the chunking.
        weights = tl.exp2(tl.fma(scores, factor, -base[:, None]))
        faded = tl.exp2(top - base)
        total = total * faded + tl.sum(weights, 1)
        if SCALED:
            of_scale = block * value_scale_block + slot * value_scale_slot + kv_head * value_scale_head
            value_scale = tl.load(value_scales + of_scale, mask=is_key, other=0.0)
            if not SCALES_VALUES:
                weights *= value_scale[None, :]
        of_value = values + block * value_block + slot * value_slot + kv_head * value_head
        stored = tl.load(of_value[:, None] + dims[None, :], mask=is_key[:, None] & (dims < VALUE)[None, :], other=0)
        sums *= faded[:, None]
        if SCALES_VALUES:
            value = rounded(decode(stored, CODE, tl.float32) * value_scale[:, None], DTYPE)
        else:
            value = decode(stored, CODE, DTYPE)
        sums += dot(rounded(weights, DTYPE), value)
        top = new_top
    return top, total, sums


#: Arguments that change between steps, for which kernels must not be specialized.
_OF_A_STEP: Final = [
    "num_sequences",
    "tables",
    "query_starts",
    "seq_lens",
    "part_starts",
    "part_sequences",
    "table_row",
]


@triton.jit(do_not_specialize=_OF_A_STEP)
def _paged_attention(  # type: ignore[no-untyped-def]
    query,
    keys,
    values,
    key_scales,
    value_scales,
    tables,
    query_starts,
    seq_lens,
    part_starts,
    part_sequences,
    slopes,
    sinks,
    out,
    part_out,
    part_top,
    part_sum,
    num_sequences,
    scale,
    soft_cap,
    query_token: tl.int64,
    query_head: tl.int64,
    key_block: tl.int64,
    key_slot: tl.int64,
    key_head: tl.int64,
    value_block: tl.int64,
    value_slot: tl.int64,
    value_head: tl.int64,
    scale_block: tl.int64,
    scale_slot: tl.int64,
    scale_head: tl.int64,
    value_scale_block: tl.int64,
    value_scale_slot: tl.int64,
    value_scale_head: tl.int64,
    table_row: tl.int64,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_MAIN: tl.constexpr,
    HEAD_REST: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    CODE: tl.constexpr,
    SCALED: tl.constexpr,
    ALIBI: tl.constexpr,
    SINKS: tl.constexpr,
    DECODES: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    UNMASKED: tl.constexpr,
):
    TILES_OF_HEADS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    tile = tl.program_id(0)
    kv_head, tile_of_heads = tl.program_id(1) // TILES_OF_HEADS, tl.program_id(1) % TILES_OF_HEADS
    SHARED: tl.constexpr = DECODES and QUERIES > 1
    split = 0
    if SPLIT_KEYS > 0:  # decodes have one query each, and come first in the step
        sequence = tl.load(part_sequences + tile)
        if sequence < 0:
            return
        split = tile - tl.load(part_starts + sequence)
        start, count, first_query = sequence, 1, 0
    else:
        sequence = _sequence_of(tile, query_starts, num_sequences, QUERIES)
        start = tl.load(query_starts + sequence)
        count = tl.load(query_starts + sequence + 1) - start
        first_query = (tile - (start // QUERIES + sequence)) * QUERIES
        if (first_query < 0) | (first_query >= count):
            return
    length = tl.load(seq_lens + sequence)

    # Range of keys that any of the tile's queries sees, or the split's part of it.
    first_at = length - count + first_query
    last_at = tl.minimum(first_at + QUERIES, length) - 1
    oldest = 0
    if WINDOW > 0:
        oldest = tl.maximum(first_at - WINDOW + 1, 0)
    begin, end = oldest // KEYS * KEYS, last_at + 1
    if SPLIT_KEYS > 0:
        begin = tl.maximum(begin, split * SPLIT_KEYS)
        end = tl.minimum(end, (split + 1) * SPLIT_KEYS)
        if begin >= end:
            return

    rows = tl.arange(0, ROWS)
    of_group = tile_of_heads * HEADS + rows % HEADS
    head = kv_head * GROUP + of_group
    is_row = (rows < QUERIES * HEADS) & (of_group < GROUP)
    if SHARED:
        neighbours = sequence // QUERIES * QUERIES
        token = neighbours + rows // HEADS
        is_row = is_row & (token < num_sequences)
        row_length = tl.load(seq_lens + token, mask=is_row, other=0)
        at = row_length - 1
        is_row = is_row & _shares_part(
            tl.where(is_row, token, -1), row_length, tl.maximum(oldest, split * SPLIT_KEYS), end,
            split * SPLIT_KEYS, (split + 1) * SPLIT_KEYS, tables + sequence * table_row, tables, seq_lens, table_row,
            BLOCK_SIZE, WINDOW,
        )  # fmt: skip
        if tl.min(tl.where(is_row, token, sequence), 0) < sequence:
            return  # the program of an earlier sequence computes this one's rows
    else:
        query_of = first_query + rows // HEADS
        is_row = is_row & (query_of < count)
        token = start + query_of
        at = length - count + query_of
    main, tail = tl.arange(0, HEAD_MAIN), HEAD_MAIN + tl.arange(0, HEAD_REST if HEAD_REST > 0 else 16)
    row_query = query + token.to(tl.int64)[:, None] * query_token + head[:, None] * query_head
    q_main = tl.load(row_query + main[None, :], mask=is_row[:, None] & (main < HEAD)[None, :], other=0.0)
    q_rest = q_main
    if HEAD_REST > 0:
        q_rest = tl.load(row_query + tail[None, :], mask=is_row[:, None] & (tail < HEAD)[None, :], other=0.0)
    slope = tl.zeros([ROWS], tl.float32)
    if ALIBI:
        slope = tl.load(slopes + head, mask=is_row, other=0.0)
    dims = tl.arange(0, VALUE_PADDED)

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, VALUE_PADDED], tl.float32)
    # Applied to scores by the FMA that subtracts the largest one.
    factor = _LOG2_E if CAPPED or ALIBI else scale * _LOG2_E
    # Keys that all queries of the tile see need no mask.
    seen_by_all = begin
    if UNMASKED and WINDOW == 0:
        seen_by_all = (first_at + 1) // KEYS * KEYS
        top, total, sums = _attention_inner(
            top, total, sums, begin, seen_by_all, end, oldest, q_main, q_rest, at, slope, tables + sequence * table_row,
            keys, values, key_scales, value_scales, kv_head, scale, soft_cap, key_block, key_slot, key_head,
            value_block, value_slot, value_head, scale_block, scale_slot, scale_head, value_scale_block,
            value_scale_slot, value_scale_head, factor, HEAD, HEAD_MAIN, HEAD_REST, VALUE, VALUE_PADDED, BLOCK_SIZE,
            WINDOW, CAPPED, CODE, SCALED, ALIBI, KEYS, False,
        )  # fmt: skip
    top, total, sums = _attention_inner(
        top, total, sums, seen_by_all, end, end, oldest, q_main, q_rest, at, slope, tables + sequence * table_row,
        keys, values, key_scales, value_scales, kv_head, scale, soft_cap, key_block, key_slot, key_head,
        value_block, value_slot, value_head, scale_block, scale_slot, scale_head, value_scale_block,
        value_scale_slot, value_scale_head, factor, HEAD, HEAD_MAIN, HEAD_REST, VALUE, VALUE_PADDED, BLOCK_SIZE, WINDOW,
        CAPPED, CODE, SCALED, ALIBI, KEYS, True,
    )  # fmt: skip

    row_out = token.to(tl.int64) * NUM_HEADS + head
    is_number = is_row[:, None] & (dims < VALUE)[None, :]
    if SPLIT_KEYS > 0:
        first_part = tl.load(part_starts + token, mask=is_row, other=0)
        part = (first_part + split).to(tl.int64) * NUM_HEADS + head
        tl.store(part_top + part, top, mask=is_row)
        tl.store(part_sum + part, total, mask=is_row)
        tl.store(part_out + part[:, None] * VALUE + dims[None, :], sums, mask=is_number)
    else:
        if SINKS:
            sums, total = _with_sink(sums, total, top, tl.load(sinks + head, mask=is_row, other=0.0))
        result = rounded(sums / tl.where(total == 0.0, 1.0, total)[:, None], query.dtype.element_ty)  # 0 without keys
        tl.store(out + row_out[:, None] * VALUE + dims[None, :], result, mask=is_number)


@triton.jit
def _with_sink(sums, total, top, sink):  # type: ignore[no-untyped-def]
    """Add the attention sink, a score without a value, after all keys."""
    sink *= _LOG2_E
    new_top = tl.maximum(top, sink)
    faded = tl.exp2(top - new_top)
    return sums * faded[:, None], total * faded + tl.exp2(sink - new_top)


@triton.jit(do_not_specialize=_OF_A_STEP)
def _merge_splits(  # type: ignore[no-untyped-def]
    part_out,
    part_top,
    part_sum,
    seq_lens,
    part_starts,
    sinks,
    out,
    NUM_HEADS: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
):
    """Merge the parts of one head of a decode, in order."""
    token, head = tl.program_id(0), tl.program_id(1)
    length = tl.load(seq_lens + token)
    oldest = 0
    if WINDOW > 0:
        oldest = tl.maximum(length - WINDOW, 0)
    dims = tl.arange(0, VALUE_PADDED)
    row = token.to(tl.int64) * NUM_HEADS + head
    before = tl.load(part_starts + token).to(tl.int64)
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    sums = tl.zeros([1, VALUE_PADDED], tl.float32)
    for split in range(oldest // KEYS * KEYS // SPLIT_KEYS, (length + SPLIT_KEYS - 1) // SPLIT_KEYS):
        part = (before + split) * NUM_HEADS + head + tl.arange(0, 1)
        part_is_top = tl.load(part_top + part)
        new_top = tl.maximum(top, part_is_top)
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        faded, weight = tl.exp2(top - base), tl.exp2(part_is_top - base)
        total = total * faded + tl.load(part_sum + part) * weight
        numbers = tl.load(part_out + part[:, None] * VALUE + dims[None, :], mask=(dims < VALUE)[None, :], other=0.0)
        sums = sums * faded[:, None] + numbers * weight[:, None]
        top = new_top
    if SINKS:
        sums, total = _with_sink(sums, total, top, tl.load(sinks + head + tl.arange(0, 1)))
    result = rounded(sums / tl.where(total == 0.0, 1.0, total)[:, None], out.dtype.element_ty)
    tl.store(out + row * VALUE + dims[None, :], result, mask=(dims < VALUE)[None, :])


def _constants(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    value_dim: int,
    block_size: int,
    code: int,
    tiles: Tiles,
    are_decodes: bool,
    split_keys: int,
) -> dict[str, Any]:
    """Return the kernel's constants, with optional features of layers turned off."""
    group = num_heads // num_kv_heads
    heads = min(group, tiles.rows)
    head_main = max(16, 1 << (head_dim.bit_length() - 1))
    head_rest = max(0, head_dim - head_main)
    return {
        "NUM_HEADS": num_heads,
        "GROUP": group,
        "HEADS": heads,
        "HEAD": head_dim,
        "HEAD_MAIN": head_main,
        "HEAD_REST": max(16, triton.next_power_of_2(head_rest)) if head_rest else 0,
        "VALUE": value_dim,
        "VALUE_PADDED": max(16, triton.next_power_of_2(value_dim)),
        "BLOCK_SIZE": block_size,
        "CODE": code,
        "DECODES": are_decodes,
        "QUERIES": tiles.rows // heads,
        "ROWS": tiles.rows,
        "KEYS": tiles.keys,
        "SPLIT_KEYS": split_keys,
        "UNMASKED": tiles.unmasked,
        "WINDOW": 0,
        "CAPPED": False,
        "SCALED": False,
        "ALIBI": False,
        "SINKS": False,
    }


@operation("stoker::paged_attention", mutates_args=("out",))
def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
    tables: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    part_starts: torch.Tensor | None,
    part_sequences: torch.Tensor | None,
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
        part_starts, part_sequences: results of `decode_splits` if the sequences are decodes, the step's first; else
            None.
        out: [tokens, heads, value_head_dim]; only rows of the given sequences are written.
    """
    num_sequences, (_, num_heads, head_dim) = len(seq_lens), query.shape
    are_decodes = part_sequences is not None
    _, block_size, num_kv_heads, value_dim = value_cache.shape
    assert scale > 0
    tiles = tiles_of(head_dim, query.dtype, code_of(key_cache.dtype), are_decodes, gpu_target_of(query.device))
    constants = _constants(
        num_heads,
        num_kv_heads,
        head_dim,
        value_dim,
        block_size,
        code_of(key_cache.dtype),
        tiles,
        are_decodes,
        tiles.split_keys,
    ) | {
        "WINDOW": sliding_window or 0,
        "CAPPED": logits_soft_cap is not None,
        "SCALED": key_scales is not None,
        "ALIBI": alibi_slopes is not None,
        "SINKS": sinks is not None,
    }
    query = query if query.stride(2) == 1 else query.contiguous()
    keys, values = stored_bytes(key_cache), stored_bytes(value_cache)
    parts: tuple[torch.Tensor | None, ...] = (None, None, None)
    if part_sequences is not None:
        num_tiles = len(part_sequences)
        parts = tuple(query.new_empty(num_tiles * num_heads * size, dtype=torch.float32) for size in (value_dim, 1, 1))
    else:
        num_tiles = len(query) // constants["QUERIES"] + num_sequences
    _paged_attention[(num_tiles, num_kv_heads * triton.cdiv(constants["GROUP"], constants["HEADS"]))](
        query,
        keys,
        values,
        key_scales,
        value_scales,
        tables,
        query_starts,
        seq_lens,
        part_starts,
        part_sequences,
        alibi_slopes,
        sinks,
        out,
        *parts,
        num_sequences,
        scale,
        logits_soft_cap or 1.0,
        *query.stride()[:2],
        *keys.stride()[:3],
        *values.stride()[:3],
        *(key_scales.stride() if key_scales is not None else (0, 0, 0)),
        *(value_scales.stride() if value_scales is not None else (0, 0, 0)),
        tables.stride(0),
        **constants,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    if are_decodes:
        _merge_splits[(num_sequences, num_heads)](
            *parts,
            seq_lens,
            part_starts,
            sinks,
            out,
            **{name: constants[name] for name in _JOINED},
        )


@paged_attention.register_fake
def _(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
    tables: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    part_starts: torch.Tensor | None,
    part_sequences: torch.Tensor | None,
    scale: float,
    sliding_window: int | None,
    logits_soft_cap: float | None,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    pass


#: Shapes of layers: query heads, KV heads, head dimensions of keys and values.
_SHAPES: Final = {
    "64": (16, 8, 64, 64),
    "96": (32, 32, 96, 96),
    "128": (32, 8, 128, 128),
    "168": (25, 5, 168, 168),
    "256": (8, 4, 256, 256),
    "mla": (128, 1, 576, 512),
}
_POINTERS: Final = {
    "key_scales": "fp32",
    "value_scales": "fp32",
    "tables": "i32",
    "query_starts": "i32",
    "seq_lens": "i32",
    "part_starts": "i32",
    "part_sequences": "i32",
    "slopes": "fp32",
    "sinks": "fp32",
    "part_out": "fp32",
    "part_top": "fp32",
    "part_sum": "fp32",
}
_NUMBERS: Final = {"num_sequences": "i32", "scale": "fp32", "soft_cap": "fp32"}


def kernel_variants(gpu: GpuTarget) -> Iterator[KernelVariant]:
    """Yield the variants of this file's kernels that common models need, for ahead-of-time compilation."""
    for shape, sizes in _SHAPES.items():
        for are_decodes in (True, False):
            for code, kind in ((PLAIN, "bf16"), (E4M3, "e4m3"), (E5M2, "e5m2"), (INT8, "int8")):
                if (code in (PLAIN, E4M3) and shape != "168") or shape == "128":
                    yield _specimen(f"{shape} {kind}", sizes, "bf16", code, are_decodes, gpu)
    for are_decodes in (True, False):
        yield _specimen("128 fp32", _SHAPES["128"], "fp32", PLAIN, are_decodes, gpu)
        every = {"WINDOW": 128, "CAPPED": True, "ALIBI": True, "SINKS": True}
        yield _specimen("128 fp16, all a layer may have", _SHAPES["128"], "fp16", PLAIN, are_decodes, gpu, **every)
        yield _specimen("96 fp16 e4m3", _SHAPES["96"], "fp16", E4M3, are_decodes, gpu)
        yield _specimen("168 e5m2, all a layer may have", _SHAPES["168"], "bf16", E5M2, are_decodes, gpu, **every)
        yield _specimen("256 fp32 e4m3", _SHAPES["256"], "fp32", E4M3, are_decodes, gpu)
    tiles = tiles_of(128, torch.bfloat16, PLAIN, True, gpu)
    constants = _constants(*_SHAPES["128"], 16, PLAIN, tiles, True, tiles.split_keys)
    yield KernelVariant.of(
        "attention join",
        _merge_splits,
        {"out": "bf16", **_POINTERS},
        _NUMBERS,
        {name: constants[name] for name in _JOINED},
    )


def _specimen(
    name: str,
    sizes: tuple[int, int, int, int],
    dtype: str,
    code: int,
    are_decodes: bool,
    gpu: GpuTarget,
    **more: object,
) -> KernelVariant:
    tiles = tiles_of(sizes[2], torch.float32 if dtype == "fp32" else torch.bfloat16, code, are_decodes, gpu)
    constants = _constants(*sizes, 16, code, tiles, are_decodes, tiles.split_keys)
    constants |= {"SCALED": code != PLAIN, **more}
    stored = dtype if code == PLAIN else "u8"
    pointers = {"query": dtype, "keys": stored, "values": stored, "out": dtype, **_POINTERS}
    absent = ["slopes"] * (not constants["ALIBI"]) + ["sinks"] * (not constants["SINKS"])
    absent += ["key_scales", "value_scales"] * (code == PLAIN)
    absent += ["part_starts", "part_sequences", "part_out", "part_top", "part_sum"] * (not tiles.split_keys)
    return KernelVariant.of(
        f"attention {'decode' if are_decodes else 'chunk'} {name}",
        _paged_attention,
        {each: of for each, of in pointers.items() if each not in absent},
        _NUMBERS,
        constants | dict.fromkeys(absent),
        tiles.warps,
        tiles.stages,
        tensor_cores=dtype != "fp32",
    )
