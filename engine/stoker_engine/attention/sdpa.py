"""Attention by torch's scaled_dot_product_attention: runs on every device, and is the reference for other backends.

All decodes are one padded call. Chunks of prompts run one by one, each over its own keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from stoker_engine.attention.backend import AttentionShape, BackendCapabilities, KVCache
from stoker_engine.attention.metadata import AttentionMetadata, BlockTables
from stoker_engine.kernels.kv_store import dequantized, kv_store


@dataclass(frozen=True)
class _View:
    """Keys that some sequences see in one group of layers.

    Attributes:
        rows: rows of the sequences in the flat batch.
        blocks: [sequences, blocks] block numbers; shorter sequences repeat their last block.
        distance: [sequences, 1, queries, blocks × block_size] int64, key position - query position.
        visible: same shape, bool: whether the query sees the key.
        unseen: [sequences, blocks × block_size, 1, 1] bool: keys that no query sees. Keys and values there are zeroed,
            because they may be NaN: multiplied by an attention weight of 0, they would make the result NaN.
    """

    rows: slice
    blocks: torch.Tensor
    distance: torch.Tensor
    visible: torch.Tensor
    unseen: torch.Tensor


@dataclass(frozen=True)
class _Plan:
    """A step's metadata and each group's views; a view of decodes is first."""

    metadata: AttentionMetadata
    views: list[list[_View]]


class SdpaBackend:
    """Gathers each sequence's blocks, then computes dense attention."""

    capabilities: ClassVar[BackendCapabilities] = BackendCapabilities()

    def prepare(self, metadata: AttentionMetadata) -> _Plan:
        """See `AttentionBackend.prepare`."""
        views = [_views(metadata, group) if group.kind == "tokens" else [] for group in metadata.groups]
        return _Plan(metadata, views)

    def forward(
        self,
        shape: AttentionShape,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None,
        cache: KVCache,
        plan: _Plan,
    ) -> torch.Tensor:
        """See `AttentionBackend.forward`."""
        group = plan.metadata.groups[cache.group]
        assert shape.sliding_window == group.sliding_window
        kv_store(key, cache.key, group.slot_mapping, cache.key_scales, cache.scales_of_tokens)
        if value is not None:
            kv_store(value, cache.value, group.slot_mapping, cache.value_scales, cache.scales_of_tokens)
        out = query.new_empty(len(query), shape.num_heads, shape.value_head_dim)
        for view in plan.views[cache.group]:
            out[view.rows] = _attend(shape, query[view.rows], cache, view)
        return out.flatten(1)


def _attend(shape: AttentionShape, query: torch.Tensor, cache: KVCache, view: _View) -> torch.Tensor:
    """Attend with the queries of one view: [rows, heads, d] → [rows, heads, value d]."""
    sequences = len(view.blocks)
    # [sequences, kv_heads, group × queries, d]: query heads that share a KV head are treated as additional queries, so
    # that keys need not be repeated.
    queries = query.shape[0] // sequences
    group = shape.num_heads // shape.num_kv_heads
    grouped = query.unflatten(0, (sequences, queries)).unflatten(2, (shape.num_kv_heads, group))
    grouped = grouped.permute(0, 2, 3, 1, 4).flatten(2, 3)
    keys = _gather(cache.key, cache.key_scales, query.dtype, view)
    values = _gather(cache.value, cache.value_scales, query.dtype, view)
    grouped = grouped.to(keys.dtype)
    if shape.logits_soft_cap is None and shape.alibi_slopes is None and shape.sinks is None:
        mask = view.visible.repeat(1, 1, group, 1)
        attended = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=shape.scale)
    else:
        scores = (grouped.float() @ keys.float().transpose(-1, -2)) * shape.scale
        if shape.logits_soft_cap is not None:
            scores = shape.logits_soft_cap * torch.tanh(scores / shape.logits_soft_cap)
        scores = scores.unflatten(2, (group, queries))
        if shape.alibi_slopes is not None:
            slopes = shape.alibi_slopes.view(shape.num_kv_heads, group, 1, 1)
            scores = scores + slopes * view.distance.unsqueeze(2)
        scores = scores.masked_fill(~view.visible.unsqueeze(2), -torch.inf)
        weights = scores.softmax(-1) if shape.sinks is None else _with_sinks(scores, shape.sinks)
        attended = weights.flatten(2, 3).to(values.dtype) @ values
    # [sequences, queries, kv_heads, group, d]
    ungrouped = attended.unflatten(2, (group, queries)).permute(0, 3, 1, 2, 4)
    rows: torch.Tensor = ungrouped.flatten(2, 3).flatten(0, 1)
    return rows


def _with_sinks(scores: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Return the softmax of `scores` [sequences, kv_heads, group, queries, keys] with the heads' sinks in the
    denominator."""
    beside = sinks.view(*scores.shape[1:3], 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, beside), dim=-1).softmax(-1)[..., :-1]


def _gather(rows: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype, view: _View) -> torch.Tensor:
    """Gather keys or values: [blocks, block_size, kv_heads, d] → [sequences, kv_heads, L, d], where L is the
    number of tokens in a sequence's blocks of the view. Tokens that no query sees are set to 0.

    The result has `dtype`, or float32 if the cache has scales or if `dtype` cannot represent the cache's dtype.
    """
    if scales is None:
        numbers = rows[view.blocks].to(torch.promote_types(rows.dtype, dtype))
    else:
        stored = rows.view(torch.uint8)[view.blocks].view(rows.dtype)  # float8 cannot be indexed everywhere
        numbers = dequantized(stored, scales[view.blocks])
    return numbers.flatten(1, 2).masked_fill_(view.unseen, 0).transpose(1, 2)


def _views(metadata: AttentionMetadata, group: BlockTables) -> list[_View]:
    """Return one view for all decodes, then one for each chunk."""
    num_sequences = len(metadata.seq_lens_host)
    parts = [slice(0, metadata.num_decodes)] if metadata.num_decodes else []
    parts += [slice(s, s + 1) for s in range(metadata.num_decodes, num_sequences)]
    return [_view(metadata, group, part) for part in parts]


def _view(metadata: AttentionMetadata, group: BlockTables, part: slice) -> _View:
    size, window, starts = metadata.block_size, group.sliding_window, metadata.query_starts_host
    rows = slice(int(starts[part.start]), int(starts[part.stop]))
    queries = int(starts[part.start + 1] - starts[part.start])
    longest = metadata.seq_lens_host[part].astype(np.int64)
    oldest = np.zeros_like(longest) if window is None else np.maximum(longest - queries + 1 - window, 0)
    count = int(((longest - 1) // size - oldest // size).max()) + 1

    lengths = metadata.seq_lens[part].long()
    device = lengths.device
    seen = torch.zeros_like(lengths) if window is None else (lengths - queries + 1 - window).clamp_min(0)
    first, last = seen // size, (lengths - 1) // size  # blocks before and after are not even gathered
    columns = torch.minimum(first[:, None] + torch.arange(count, device=device), last[:, None])
    blocks = group.tables[part].gather(1, columns).long()
    keys = (first * size)[:, None] + torch.arange(count * size, device=device)  # positions
    at = (lengths - queries)[:, None] + torch.arange(queries, device=device)
    distance = (keys[:, None, :] - at[:, :, None]).unsqueeze(1)
    visible = distance <= 0
    if window is not None:
        visible = visible & (distance > -window)
    unseen = (keys < seen[:, None]) | (keys >= lengths[:, None])
    return _View(rows, blocks, distance, visible, unseen[..., None, None])
