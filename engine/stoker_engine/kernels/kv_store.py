"""Writes new keys or values into the paged cache."""

from __future__ import annotations

import torch


def kv_store(rows: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Scatters `rows` [tokens, kv_heads, d] to `slot_mapping` [tokens] of `cache` [blocks, block_size, kv_heads, d].

    slot = block × block_size + offset. The cache may be strided: blocks need not follow each other.
    """
    size = cache.shape[1]
    cache[slot_mapping // size, slot_mapping % size] = rows
