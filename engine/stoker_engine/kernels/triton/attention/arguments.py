"""Arguments of attention kernels, grouped into tuples that Triton passes to a kernel as such.

The tuples contain values that differ between a model's layers, but not between steps. A step's values are arguments of
their own, since Triton specializes a kernel for a tuple's elements (their alignment, and integers that are 1) even if
``do_not_specialize`` names the tuple. Kernels are also specialized for optional arguments that are None.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton

from stoker_engine.kernels.triton.attention.attention_tiles import Tiles, tiles_of
from stoker_engine.kernels.triton.common.float8 import code_of, stored_bytes
from stoker_engine.kernels.triton.common.gpu_target import gpu_target_of


class Paged(NamedTuple):
    """A tensor [blocks, block_size, kv_heads, …] of a layer's cache: its data, and the strides of these dimensions in
    elements. In variants for ahead-of-time compilation the fields have Triton's types."""

    data: Any
    block: Any
    slot: Any
    head: Any


class KeyValues(NamedTuple):
    """A layer's cache. The scales are `Paged`; None if elements are not quantized."""

    key: Paged
    value: Paged
    key_scale: Any
    value_scale: Any


class Queries(NamedTuple):
    """Queries [tokens, heads, head_dim]: their data, and the strides of tokens and heads in elements."""

    data: Any
    token: Any
    head: Any


class Scores(NamedTuple):
    """How a layer computes scores, see `attention.backend.AttentionShape`; None: without the option."""

    scale: Any
    soft_cap: Any
    slopes: Any
    sinks: Any


class LayerShape(NamedTuple):
    """Constants of a layer's kernels.

    Attributes:
        num_heads: query heads.
        group: query heads that share a KV head.
        group_tile: query heads of a tile, which share a KV head.
        head_dim, value_dim: elements of keys and of values.
        head_main, head_rest: elements of a key that are multiplied at once, powers of two, and the rest, padded to one;
            0: none.
        value_padded: `value_dim`, padded to a power of two.
        code: storage format of the cache (`common.float8`).
        window: number of visible keys; 0: all.
        queries, rows, keys: size of a tile: queries, queries × heads padded to a power of two, keys.
        unmasked: see `Tiles`.
    """

    num_heads: int
    group: int
    group_tile: int
    head_dim: int
    head_main: int
    head_rest: int
    value_dim: int
    value_padded: int
    block_size: int
    code: int
    window: int
    queries: int
    rows: int
    keys: int
    unmasked: bool

    @property
    def head_tiles(self) -> int:
        """Number of tiles into which a KV head's query heads are divided."""
        return -(-self.group // self.group_tile)


def layer_shape(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    value_dim: int,
    block_size: int,
    code: int,
    window: int | None,
    tiles: Tiles,
) -> LayerShape:
    """Return the constants of a layer's kernels with tiles of the given size."""
    group = num_heads // num_kv_heads
    group_tile = min(group, tiles.rows)
    head_main = max(16, 1 << (head_dim.bit_length() - 1))
    head_rest = max(0, head_dim - head_main)
    return LayerShape(
        num_heads=num_heads,
        group=group,
        group_tile=group_tile,
        head_dim=head_dim,
        head_main=head_main,
        head_rest=max(16, triton.next_power_of_2(head_rest)) if head_rest else 0,
        value_dim=value_dim,
        value_padded=max(16, triton.next_power_of_2(value_dim)),
        block_size=block_size,
        code=code,
        window=window or 0,
        queries=tiles.rows // group_tile,
        rows=tiles.rows,
        keys=tiles.keys,
        unmasked=tiles.unmasked,
    )


class LayerArguments(NamedTuple):
    """Arguments of a layer's kernels, and the tiles that they are compiled for."""

    queries: Queries
    cache: KeyValues
    scores: Scores
    shape: LayerShape
    tiles: Tiles


def layer_arguments(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
    scale: float,
    sliding_window: int | None,
    logits_soft_cap: float | None,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    are_decodes: bool,
) -> LayerArguments:
    """Return the kernels' arguments for a layer. For the tensors see `attention.backend`.

    Args:
        query: [tokens, heads, head_dim].
    """
    assert scale > 0
    _, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, value_dim = value_cache.shape
    code = code_of(key_cache.dtype)
    tiles = tiles_of(head_dim, query.dtype, code, are_decodes, gpu_target_of(query.device))
    query = query if query.stride(2) == 1 else query.contiguous()
    return LayerArguments(
        Queries(query, *query.stride()[:2]),
        KeyValues(_paged(key_cache), _paged(value_cache), *map(_optional, (key_scales, value_scales))),
        Scores(scale, logits_soft_cap, alibi_slopes, sinks),
        layer_shape(num_heads, num_kv_heads, head_dim, value_dim, block_size, code, sliding_window, tiles),
        tiles,
    )


def _paged(tensor: torch.Tensor) -> Paged:
    stored = stored_bytes(tensor)
    return Paged(stored, *stored.stride()[:3])


def _optional(scales: torch.Tensor | None) -> Paged | None:
    return None if scales is None else _paged(scales)
