"""Attention by FlashAttention-3 (Shah et al., 2024) on Hopper, by the package tokenspeed-fa3; see `varlen`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from stoker_engine.attention.backend import AttentionShape, KVCache
from stoker_engine.attention.varlen import VarlenBackend, VarlenPart, window_size


class FA3Backend(VarlenBackend):
    """Attention by FlashAttention-3.

    Args:
        attend: `flash_attn_interface.flash_attn_with_kvcache`.
    """

    def __init__(self, attend: Callable[..., torch.Tensor]) -> None:
        self._attend = attend

    def attend_part(self, shape: AttentionShape, query: torch.Tensor, cache: KVCache, part: VarlenPart) -> torch.Tensor:
        """See `VarlenBackend`."""
        return self._attend(
            query,
            cache.key,
            cache.value,
            cache_seqlens=part.seq_lens,
            page_table=part.tables[cache.group],
            cu_seqlens_q=part.query_starts,
            max_seqlen_q=part.most_queries,
            softmax_scale=shape.scale,
            causal=True,
            window_size=window_size(shape),
        )
