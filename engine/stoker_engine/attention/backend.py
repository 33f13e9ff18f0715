"""The seam between models and attention: a layer states its shape, a backend computes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from stoker_engine.attention.metadata import AttentionMetadata


@dataclass(frozen=True)
class AttentionShape:
    """What is fixed for one layer.

    Attributes:
        scale: the scores are multiplied by it.
        sliding_window: tokens seen back, the current one included; None sees all.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None


@dataclass(frozen=True)
class KVCache:
    """One layer's part of the paged cache: keys and values, each [blocks, block_size, kv_heads, head_dim]."""

    key: torch.Tensor
    value: torch.Tensor


class AttentionBackend(Protocol):
    """Computes causal attention of a flat batch against the paged cache."""

    def forward(
        self,
        shape: AttentionShape,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: KVCache,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Stores `key` and `value` [tokens, kv_heads, d] and attends with `query` [tokens, heads, d].

        Returns:
            [tokens, heads × d], in the query's dtype.
        """
        ...
