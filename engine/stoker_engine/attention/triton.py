"""Attention by Triton's kernels: reads keys and values where they lie in their blocks.

A step's decodes are one launch, in which long sequences are split, and its chunks another. Each row has the same bits
whatever else is in the batch; and, where that is asked for, whether it comes in a chunk or as a decode.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stoker_engine.attention.backend import Angles, AttentionShape, HeadNorm, KVCache
from stoker_engine.attention.metadata import AttentionMetadata
from stoker_engine.kernels.triton.attention import paged_attention
from stoker_engine.kernels.triton.kv_store import kv_store
from stoker_engine.kernels.triton.store_latent import store_latent
from stoker_engine.kernels.triton.turn_and_store import turn_and_store


@dataclass(frozen=True)
class _Part:
    """Sequences that are computed by one launch.

    Attributes:
        tables: [sequences, blocks] by group.
        longest: the most tokens of any.
        num_keys: tokens of all.
    """

    query_starts: torch.Tensor
    seq_lens: torch.Tensor
    tables: list[torch.Tensor]
    longest: int
    num_keys: int
    are_decodes: bool


@dataclass(frozen=True)
class _Plan:
    metadata: AttentionMetadata
    parts: list[_Part]


@dataclass(frozen=True)
class TritonBackend:
    """Attention on a GPU, or anywhere in Triton's interpreter.

    Attributes:
        batch_invariant: a token must have the same bits in a chunk and as a decode, too. So decodes are chunks of one
            token, of which long ones are not split.
    """

    batch_invariant: bool = False

    def prepare(self, metadata: AttentionMetadata) -> _Plan:
        """See `AttentionBackend.prepare`."""
        decodes, count = 0 if self.batch_invariant else metadata.num_decodes, len(metadata.seq_lens_host)
        parts = [
            _Part(
                metadata.query_starts[begin : end + 1],
                metadata.seq_lens[begin:end],
                [group.tables[begin:end] for group in metadata.groups],
                int(metadata.seq_lens_host[begin:end].max()),
                int(metadata.seq_lens_host[begin:end].sum(dtype=int)),
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
        return self.attend(shape, query, cache, plan)

    def forward_qkv(
        self,
        shape: AttentionShape,
        qkv: torch.Tensor,
        norm: HeadNorm | None,
        angles: Angles | None,
        cache: KVCache,
        plan: _Plan,
    ) -> torch.Tensor:
        """See `FusingBackend`."""
        group = plan.metadata.groups[cache.group]
        assert shape.sliding_window == group.sliding_window
        turn_and_store(
            qkv,
            shape.num_heads,
            None if norm is None else norm.q_weight,
            None if norm is None else norm.k_weight,
            0.0 if norm is None else norm.eps,
            None if angles is None else angles.cos,
            None if angles is None else angles.sin,
            angles is not None and angles.interleaved,
            cache.key,
            cache.value,
            cache.key_scales,
            cache.value_scales,
            cache.scales_of_tokens,
            group.slot_mapping,
        )
        return self.attend(shape, qkv[:, : shape.num_heads], cache, plan)

    def store_latent(
        self,
        rows: torch.Tensor,
        q_weight: torch.Tensor | None,
        kv_weight: torch.Tensor,
        eps: float,
        angles: Angles,
        cache: KVCache,
        plan: _Plan,
    ) -> torch.Tensor:
        """See `FusingBackend`."""
        queries: torch.Tensor = store_latent(
            rows,
            q_weight,
            kv_weight,
            eps,
            angles.cos,
            angles.sin,
            angles.interleaved,
            cache.key,
            cache.key_scales,
            cache.scales_of_tokens,
            plan.metadata.groups[cache.group].slot_mapping,
        )
        return queries

    def attend(self, shape: AttentionShape, query: torch.Tensor, cache: KVCache, plan: _Plan) -> torch.Tensor:
        """See `FusingBackend`."""
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
                part.num_keys,
                part.are_decodes,
                shape.scale,
                shape.sliding_window,
                shape.logits_soft_cap,
                shape.alibi_slopes,
                shape.sinks,
                out,
            )
        return out.flatten(1)
