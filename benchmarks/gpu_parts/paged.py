"""One layer's attention over a paged cache, as the engine computes it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import numpy as np
import torch

from gpu_parts.scale import Attention
from stoker_engine.architectures.cache_spec import CacheSpec
from stoker_engine.architectures.decoder_config import AttentionConfig
from stoker_engine.attention.backend import AttentionShape, KVCache, fuses_kv
from stoker_engine.attention.external import AttentionRequirements
from stoker_engine.attention.metadata import AttentionMetadata, BlockTables
from stoker_engine.attention.select import attention_backend
from stoker_engine.exec.kv_views import layer_view
from stoker_engine.sizing.kv_format import kv_format


def paged_attention(
    shape: Attention, lengths: list[int], contexts: list[int], block_size: int, device: torch.device
) -> Callable[[], torch.Tensor]:
    """Return a computation in which sequence s computes its last `lengths[s]` tokens of a context of `contexts[s]`, in
    bfloat16. If the backend fuses the store of keys and values with other operations, the store is excluded."""
    config = AttentionConfig(shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim**-0.5)
    requirements = AttentionRequirements([config], torch.bfloat16, "bfloat16", block_size)
    backend = attention_backend(device, requirements)
    cache, metadata = _cache(shape, lengths, contexts, block_size, device)
    plan = backend.prepare(metadata)
    layer = AttentionShape(shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim, config.scale)
    query, key, value = (
        torch.randn(sum(lengths), heads, shape.head_dim, dtype=torch.bfloat16, device=device)
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    )

    def run(_metadata: AttentionMetadata = metadata) -> torch.Tensor:  # a plan may only have the tensors' addresses
        if fuses_kv(backend):
            return backend.attend(layer, query, cache, plan)
        return backend.forward(layer, query, key, value, cache, plan)

    return run


def _cache(
    shape: Attention, lengths: list[int], contexts: list[int], block_size: int, device: torch.device
) -> tuple[KVCache, AttentionMetadata]:
    """Return a cache with random keys and values, whose sequences have blocks anywhere, and a step's metadata."""
    spec, kv = CacheSpec(shape.kv_heads, shape.head_dim, shape.head_dim, None), kv_format("auto", "torch.bfloat16")
    counts = [-(-context // block_size) for context in contexts]
    elements = kv.token_bytes(spec) * block_size // 2
    pool = torch.randn(sum(counts) + 1, elements, dtype=torch.bfloat16, device=device).view(torch.uint8)
    cache = layer_view(pool, spec, block_size, 0, kv, None, heads_first=device.type == "cpu")
    blocks = iter((torch.randperm(sum(counts)) + 1).int().split(counts))
    tables = torch.zeros(len(contexts), max(counts), dtype=torch.int32)
    slots = []
    for row, (length, context) in enumerate(zip(lengths, contexts, strict=True)):
        own = next(blocks)
        tables[row, : len(own)] = own
        positions = torch.arange(context - length, context)
        slots.append(own.long()[positions // block_size] * block_size + positions % block_size)
    starts = np.array([0, *accumulate(lengths)], dtype=np.int32)
    seq_lens = np.array(contexts, dtype=np.int32)
    metadata = AttentionMetadata(
        query_starts=torch.from_numpy(starts).to(device),
        seq_lens=torch.from_numpy(seq_lens).to(device),
        num_decodes=sum(length == 1 for length in lengths),
        block_size=block_size,
        groups=[BlockTables(tables.to(device), torch.cat(slots).to(device))],
        query_starts_host=starts,
        seq_lens_host=seq_lens,
    )
    return cache, metadata
