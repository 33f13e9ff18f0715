"""Attention by the package flash-attn (FlashAttention-2: Dao, 2023), on the paged cache.

Triton kernels store keys and values. A step's decodes are one call, so that the package may split their keys; the
step's chunks are a second call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from stoker_engine.attention.backend import AttentionShape, KVCache
from stoker_engine.attention.fused_kv import FusedKVStoreBackend
from stoker_engine.attention.metadata import AttentionMetadata


@dataclass(frozen=True)
class _Part:
    """Sequences of one call.

    Attributes:
        rows: rows of these sequences in the flat batch.
        query_starts, key_starts: [sequences + 1] int32 cumulative lengths, starting at 0.
        tables: [sequences, blocks] block tables by group.
        most_queries, most_keys: maximum number of queries and keys of a sequence.
    """

    rows: slice
    query_starts: torch.Tensor
    key_starts: torch.Tensor
    tables: list[torch.Tensor]
    most_queries: int
    most_keys: int


@dataclass(frozen=True)
class _Plan:
    metadata: AttentionMetadata
    parts: list[_Part]


class FlashAttnBackend(FusedKVStoreBackend):
    """Attention by flash-attn; see the module's docstring.

    Args:
        attend: `flash_attn.flash_attn_varlen_func`.
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
                part.query_starts,
                part.key_starts,
                part.most_queries,
                part.most_keys,
                softmax_scale=shape.scale,
                causal=True,
                window_size=(-1, -1) if window is None else (window - 1, 0),
                softcap=shape.logits_soft_cap or 0.0,
                alibi_slopes=shape.alibi_slopes,
                block_table=part.tables[cache.group],
            )
            for part in plan.parts
        ]
        return (done[0] if len(done) == 1 else torch.cat(done)).flatten(1)


def _part(metadata: AttentionMetadata, begin: int, end: int) -> _Part:
    starts, lengths = metadata.query_starts_host, metadata.seq_lens_host[begin:end]
    query_starts = metadata.query_starts[begin : end + 1]
    return _Part(
        slice(int(starts[begin]), int(starts[end])),
        query_starts - query_starts[0],
        pad(metadata.seq_lens[begin:end].cumsum(0, dtype=torch.int32), (1, 0)),
        [group.tables[begin:end] for group in metadata.groups],
        int((starts[begin + 1 : end + 1] - starts[begin:end]).max()),
        int(lengths.max()),
    )
