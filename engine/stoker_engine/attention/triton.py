"""Attention by Triton kernels, which read keys and values directly from the cache blocks.

One call computes a step's decodes, with keys split into parts, and another one its chunks. Each row's result has the
same bits in every batch. With `batch_invariant`, decodes are computed as chunks of one token, so the bits are also
the same in a chunk and in a decode.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch

from stoker_engine.attention.backend import AttentionShape, BackendCapabilities, KVCache
from stoker_engine.attention.fused_kv import FusedKVStoreBackend
from stoker_engine.attention.metadata import AttentionMetadata
from stoker_engine.kernels.triton.attention.decode import decode_attention, merges_parts
from stoker_engine.kernels.triton.attention.decode_splits import count_parts, decode_splits
from stoker_engine.kernels.triton.attention.prefill import prefill_attention
from stoker_engine.kernels.triton.common.float8 import code_of
from stoker_engine.kernels.triton.common.gpu_target import gpu_target_of


@dataclass(frozen=True)
class _Part:
    """Sequences that are computed together.

    Attributes:
        tables: [sequences, blocks] block tables by KV cache group.
        starts, sequences: result of `decode_splits` for decodes; None for chunks.
    """

    query_starts: torch.Tensor
    seq_lens: torch.Tensor
    tables: list[torch.Tensor]
    starts: torch.Tensor | None = None
    sequences: torch.Tensor | None = None


@dataclass(frozen=True)
class _Plan:
    """Plan of a step.

    Attributes:
        counters: for each number of heads of layers whose parts the decode kernel joins, zeros in which a layer's
            decodes count finished parts: int32 [decodes × heads]. Layers take turns.
    """

    metadata: AttentionMetadata
    parts: list[_Part]
    counters: dict[int, torch.Tensor] = field(default_factory=dict)

    def counters_of(self, shape: AttentionShape, cache: KVCache) -> torch.Tensor | None:
        """Return the counters for a layer; None if another launch joins its parts."""
        num_heads, gpu = shape.num_heads, gpu_target_of(cache.key.device)
        if not merges_parts(num_heads // shape.num_kv_heads, code_of(cache.key.dtype), gpu):
            return None
        if num_heads not in self.counters:
            decodes, device = self.metadata.num_decodes, self.metadata.seq_lens.device
            self.counters[num_heads] = torch.zeros(decodes * num_heads, dtype=torch.int32, device=device)
        return self.counters[num_heads]


@dataclass(frozen=True)
class TritonBackend(FusedKVStoreBackend):
    """Attention on a GPU, or on any device in Triton's interpreter.

    Attributes:
        batch_invariant: whether decodes are computed as chunks (see the module).
    """

    capabilities: ClassVar[BackendCapabilities] = BackendCapabilities(
        fuses_kv=True, captures_steps=True, batch_invariant=True
    )

    batch_invariant: bool = False

    def prepare(self, metadata: AttentionMetadata) -> _Plan:
        """See `AttentionBackend.prepare`."""
        decodes, count = 0 if self.batch_invariant else metadata.num_decodes, len(metadata.seq_lens_host)
        starts, seq_lens, first_chunk = metadata.query_starts, metadata.seq_lens, decodes
        if decodes and metadata.graph_decodes is not None:
            # The second call covers all sequences, in which decodes have no queries. The first one treats chunks as
            # decodes without keys, so it may write zeros to rows of chunks, which the second one overwrites.
            seq_lens = seq_lens * (starts[:-1] < metadata.graph_decodes)
            starts, first_chunk = torch.maximum(starts, metadata.graph_decodes), 0
        parts = []
        if decodes:
            listed = decode_splits(seq_lens[:decodes], count_parts(metadata.seq_lens_host[:decodes]))
            parts.append(_part(metadata, slice(0, decodes), metadata.query_starts, seq_lens, *listed))
        if first_chunk < count:
            parts.append(_part(metadata, slice(first_chunk, count), starts, metadata.seq_lens))
        return _Plan(metadata, parts)

    def fits(self, seq_lens: np.ndarray, planned: np.ndarray) -> bool:
        """See `GraphBackend.fits`."""
        return self.batch_invariant or count_parts(seq_lens) <= count_parts(planned)

    def attend(self, shape: AttentionShape, query: torch.Tensor, cache: KVCache, plan: _Plan) -> torch.Tensor:
        """See `FusedKVBackend.attend`."""
        out = query.new_empty(len(query), shape.num_heads, shape.value_head_dim)
        for part in plan.parts:
            if part.starts is not None and part.sequences is not None:
                decode_attention(
                    query,
                    cache.key,
                    cache.value,
                    cache.key_scales,
                    cache.value_scales,
                    part.tables[cache.group],
                    part.seq_lens,
                    part.starts,
                    part.sequences,
                    plan.counters_of(shape, cache),
                    shape.scale,
                    shape.sliding_window,
                    shape.logits_soft_cap,
                    shape.alibi_slopes,
                    shape.sinks,
                    out,
                )
            else:
                prefill_attention(
                    query,
                    cache.key,
                    cache.value,
                    cache.key_scales,
                    cache.value_scales,
                    part.tables[cache.group],
                    part.query_starts,
                    part.seq_lens,
                    shape.scale,
                    shape.sliding_window,
                    shape.logits_soft_cap,
                    shape.alibi_slopes,
                    shape.sinks,
                    out,
                )
        return out.flatten(1)


def _part(
    metadata: AttentionMetadata, of: slice, query_starts: torch.Tensor, seq_lens: torch.Tensor, *listed: torch.Tensor
) -> _Part:
    return _Part(
        query_starts[of.start : of.stop + 1], seq_lens[of], [group.tables[of] for group in metadata.groups], *listed
    )
