"""Attention by the package flash-attn (FlashAttention-2: Dao, 2023); see `varlen`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from stoker_engine.attention.backend import AttentionShape, KVCache
from stoker_engine.attention.varlen import VarlenBackend, VarlenPart, window_size


class FlashAttnBackend(VarlenBackend):
    """Attention by flash-attn.

    Args:
        attend: `flash_attn.flash_attn_varlen_func`.
    """

    def __init__(self, attend: Callable[..., torch.Tensor]) -> None:
        self._attend = attend

    def attend_part(self, shape: AttentionShape, query: torch.Tensor, cache: KVCache, part: VarlenPart) -> torch.Tensor:
        """See `VarlenBackend`."""
        return self._attend(
            query,
            cache.key,
            cache.value,
            part.query_starts,
            part.key_starts,
            part.most_queries,
            part.most_keys,
            softmax_scale=shape.scale,
            causal=True,
            window_size=window_size(shape),
            softcap=shape.logits_soft_cap or 0.0,
            alibi_slopes=shape.alibi_slopes,
            block_table=part.tables[cache.group],
        )
