"""Attention by FlashAttention-3 (Shah et al., 2024) on Hopper, by the package tokenspeed-fa3, on the paged cache.

Triton kernels store keys and values. A step's decodes are one call, so that the package may split their keys; the
step's chunks are a second call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from stoker_engine.attention.backend import AttentionShape, KVCache
from stoker_engine.attention.fused_kv import FusedKVStoreBackend
from stoker_engine.attention.metadata import AttentionMetadata


@dataclass(frozen=True)
class _Part:
    """Sequences of one call.

    Attributes:
        rows: rows of these sequences in the flat batch.
        query_starts: [sequences + 1] int32 cumulative numbers of queries, starting at 0.
        seq_lens: [sequences] int32.
        tables: [sequences, blocks] block tables by group.
        most_queries: maximum number of queries of a sequence.
    """

    rows: slice
    query_starts: torch.Tensor
    seq_lens: torch.Tensor
    tables: list[torch.Tensor]
    most_queries: int


@dataclass(frozen=True)
class _Plan:
    metadata: AttentionMetadata
    parts: list[_Part]


class FA3Backend(FusedKVStoreBackend):
    """Attention by FlashAttention-3; see the module's docstring.

    Args:
        attend: `flash_attn_interface.flash_attn_with_kvcache`.
    """

    def __init__(self, attend: Callable[..., torch.Tensor]) -> None:
        self._attend = attend

    def prepare(self, metadata: AttentionMetadata) -> _Plan:
        """See `AttentionBackend.prepare`."""
        decodes, count = metadata.num_decodes, len(metadata.seq_lens_host)
        cuts = ((0, decodes), (decodes, count))
        return _Plan(metadata, [_part(metadata, begin, end) for begin, end in cuts if begin < end])

    def attend(self, shape: AttentionShape, query: torch.Tensor, cache: KVCache, plan: _Plan) -> torch.Tensor:
        """See `FusedKVBackend`."""
        window = shape.sliding_window
        done = [
            self._attend(
                query[part.rows],
                cache.key,
                cache.value,
                cache_seqlens=part.seq_lens,
                page_table=part.tables[cache.group],
                cu_seqlens_q=part.query_starts,
                max_seqlen_q=part.most_queries,
                softmax_scale=shape.scale,
                causal=True,
                window_size=(-1, -1) if window is None else (window - 1, 0),
            )
            for part in plan.parts
        ]
        return (done[0] if len(done) == 1 else torch.cat(done)).flatten(1)


def _part(metadata: AttentionMetadata, begin: int, end: int) -> _Part:
    starts = metadata.query_starts_host
    query_starts = metadata.query_starts[begin : end + 1]
    return _Part(
        slice(int(starts[begin]), int(starts[end])),
        query_starts - query_starts[0],
        metadata.seq_lens[begin:end],
        [group.tables[begin:end] for group in metadata.groups],
        int((starts[begin + 1 : end + 1] - starts[begin:end]).max()),
    )
