"""Attention by packages that compute sequences of various lengths in one call, on the paged cache.

Triton kernels store keys and values. A step's decodes are one call, so that the package may split their keys; the
step's chunks are a second call.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.nn.functional import pad

from stoker_engine.attention.backend import AttentionShape, KVCache
from stoker_engine.attention.fused_kv import FusedKVStoreBackend
from stoker_engine.attention.metadata import AttentionMetadata


@dataclass(frozen=True)
class VarlenPart:
    """Sequences of one call.

    Attributes:
        rows: rows of these sequences in the flat batch.
        query_starts: [sequences + 1] int32 cumulative numbers of queries, starting at 0.
        seq_lens: [sequences] int32.
        tables: [sequences, blocks] block tables by group.
        most_queries, most_keys: maximum number of queries and keys of a sequence.
    """

    rows: slice
    query_starts: torch.Tensor
    seq_lens: torch.Tensor
    tables: list[torch.Tensor]
    most_queries: int
    most_keys: int

    @classmethod
    def of(cls, metadata: AttentionMetadata, begin: int, end: int) -> VarlenPart:
        """Return the part with the sequences from `begin` to `end`."""
        starts = metadata.query_starts_host
        query_starts = metadata.query_starts[begin : end + 1]
        return cls(
            slice(int(starts[begin]), int(starts[end])),
            query_starts - query_starts[0],
            metadata.seq_lens[begin:end],
            [group.tables[begin:end] for group in metadata.groups],
            int((starts[begin + 1 : end + 1] - starts[begin:end]).max()),
            int(metadata.seq_lens_host[begin:end].max()),
        )

    @cached_property
    def key_starts(self) -> torch.Tensor:
        """[sequences + 1] int32 cumulative numbers of keys, starting at 0; computed once for all layers."""
        return pad(self.seq_lens.cumsum(0, dtype=torch.int32), (1, 0))


@dataclass(frozen=True)
class VarlenPlan:
    """Plan of a step."""

    metadata: AttentionMetadata
    parts: list[VarlenPart]


class VarlenBackend(FusedKVStoreBackend):
    """Attention by such a package; see the module's docstring."""

    def prepare(self, metadata: AttentionMetadata) -> VarlenPlan:
        """See `AttentionBackend.prepare`."""
        decodes, count = metadata.num_decodes, len(metadata.seq_lens_host)
        cuts = ((0, decodes), (decodes, count))
        return VarlenPlan(metadata, [VarlenPart.of(metadata, begin, end) for begin, end in cuts if begin < end])

    def attend(self, shape: AttentionShape, query: torch.Tensor, cache: KVCache, plan: VarlenPlan) -> torch.Tensor:
        """See `FusedKVBackend`."""
        done = [self.attend_part(shape, query[part.rows], cache, part) for part in plan.parts]
        return (done[0] if len(done) == 1 else torch.cat(done)).flatten(1)

    @abstractmethod
    def attend_part(self, shape: AttentionShape, query: torch.Tensor, cache: KVCache, part: VarlenPart) -> torch.Tensor:
        """Return attention of the part's queries.

        Args:
            query: [rows of the part, heads, head_dim].

        Returns:
            [rows of the part, heads, value_head_dim].
        """


def window_size(shape: AttentionShape) -> tuple[int, int]:
    """Return the numbers of keys that a query sees before and after its own position, as FlashAttention's packages
    take them; -1: all."""
    return (-1, -1) if shape.sliding_window is None else (shape.sliding_window - 1, 0)
