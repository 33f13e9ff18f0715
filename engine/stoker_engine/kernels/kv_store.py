"""Writes new keys and values into the paged cache."""

from __future__ import annotations

import torch


def kv_store(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Scatters `key` and `value` [tokens, kv_heads, d] to `slots` [tokens] of the caches.

    The caches are [blocks, block_size, kv_heads, d]; slot = block × block_size + offset.
    """
    key_cache.flatten(0, 1).index_copy_(0, slots, key)
    value_cache.flatten(0, 1).index_copy_(0, slots, value)
