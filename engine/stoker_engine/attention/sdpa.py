"""Attention by torch's scaled_dot_product_attention: runs on every device, and defines what is right."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from stoker_engine.attention.backend import AttentionShape, KVCache
from stoker_engine.attention.metadata import AttentionMetadata
from stoker_engine.kernels.kv_store import kv_store


class SdpaBackend:
    """Gathers each sequence's blocks, then attends densely."""

    def forward(
        self,
        shape: AttentionShape,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: KVCache,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """See `AttentionBackend.forward`."""
        kv_store(key, value, cache.key, cache.value, metadata.slots)
        out = torch.empty_like(query)
        if metadata.num_decodes:
            decodes = slice(0, metadata.num_decodes)
            out[decodes] = self._decode(shape, query[decodes], cache, metadata)
        for chunk in metadata.chunks[shape.sliding_window]:
            keys = cache.key[chunk.blocks].flatten(0, 1).transpose(0, 1).unsqueeze(0)  # [1, kv_heads, L, d]
            values = cache.value[chunk.blocks].flatten(0, 1).transpose(0, 1).unsqueeze(0)
            attended = scaled_dot_product_attention(
                query[chunk.rows].transpose(0, 1).unsqueeze(0),  # [1, heads, chunk, d]
                keys,
                values,
                attn_mask=chunk.mask,
                scale=shape.scale,
                enable_gqa=shape.num_heads != shape.num_kv_heads,
            )
            out[chunk.rows] = attended.squeeze(0).transpose(0, 1)
        return out.flatten(1)

    @staticmethod
    def _decode(
        shape: AttentionShape, query: torch.Tensor, cache: KVCache, metadata: AttentionMetadata
    ) -> torch.Tensor:
        view = metadata.decodes[shape.sliding_window]
        # The query heads that share a KV head stand in for several queries: no key is copied for them.
        grouped = query.view(len(query), shape.num_kv_heads, -1, shape.head_dim)  # [decodes, kv_heads, group, d]
        keys = cache.key[view.blocks].flatten(1, 2).transpose(1, 2)  # [decodes, kv_heads, L, d]
        values = cache.value[view.blocks].flatten(1, 2).transpose(1, 2)
        attended = scaled_dot_product_attention(grouped, keys, values, attn_mask=view.mask, scale=shape.scale)
        return attended.flatten(1, 2)
