"""Attention by Triton's kernels: reads keys and values where they lie in their blocks.

A step's decodes are one launch, in which long sequences are split, and its chunks another. Each row has the same bits
whatever else is in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stoker_engine.attention.backend import AttentionShape, KVCache
from stoker_engine.attention.metadata import AttentionMetadata
from stoker_engine.kernels.triton.attention import paged_attention
from stoker_engine.kernels.triton.kv_store import kv_store


@dataclass(frozen=True)
class _Part:
    """Sequences that are computed by one launch.

    Attributes:
        tables: [sequences, blocks] by group.
        longest: the most tokens of any.
    """

    query_starts: torch.Tensor
    seq_lens: torch.Tensor
    tables: list[torch.Tensor]
    longest: int
    are_decodes: bool


@dataclass(frozen=True)
class _Plan:
    metadata: AttentionMetadata
    parts: list[_Part]


class TritonBackend:
    """Attention on a GPU, or anywhere in Triton's interpreter."""

    def prepare(self, metadata: AttentionMetadata) -> _Plan:
        """See `AttentionBackend.prepare`."""
        decodes, count = metadata.num_decodes, len(metadata.seq_lens_host)
        parts = [
            _Part(
                metadata.query_starts[begin : end + 1],
                metadata.seq_lens[begin:end],
                [group.tables[begin:end] for group in metadata.groups],
                int(metadata.seq_lens_host[begin:end].max()),
                end <= decodes,
            )
            for begin, end in ((0, decodes), (decodes, count))
            if begin < end
        ]
        return _Plan(metadata, parts)

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
        for part in plan.parts:
            paged_attention(
                query,
                cache.key,
                cache.value,
                cache.key_scales,
                cache.value_scales,
                part.tables[cache.group],
                part.query_starts,
                part.seq_lens,
                part.longest,
                part.are_decodes,
                shape.scale,
                shape.sliding_window,
                shape.logits_soft_cap,
                shape.alibi_slopes,
                shape.sinks,
                out,
            )
        return out.flatten(1)
