"""Base of backends that run Triton kernels between QKV projection and attention: head norms, RoPE and KV store."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from stoker_engine.attention.backend import (
    AttentionPlan,
    AttentionShape,
    BackendCapabilities,
    HeadNorm,
    KVCache,
    RopeCosSin,
)
from stoker_engine.attention.metadata import AttentionMetadata
from stoker_engine.kernels.triton.attention.kv_store import kv_store
from stoker_engine.kernels.triton.attention.mla_rope_and_cache import mla_rope_and_cache
from stoker_engine.kernels.triton.attention.rope_and_cache import rope_and_cache


class FusedKVStoreBackend(ABC):
    """Base class of `FusedKVBackend`s, with all operations but attention. Plans must have the attribute `metadata`."""

    capabilities: ClassVar[BackendCapabilities] = BackendCapabilities(fuses_kv=True)

    @abstractmethod
    def prepare(self, metadata: AttentionMetadata) -> AttentionPlan:
        """See `AttentionBackend.prepare`."""

    @abstractmethod
    def attend(self, shape: AttentionShape, query: torch.Tensor, cache: KVCache, plan: AttentionPlan) -> torch.Tensor:
        """See `FusedKVBackend`."""

    def forward(
        self,
        shape: AttentionShape,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None,
        cache: KVCache,
        plan: AttentionPlan,
    ) -> torch.Tensor:
        """See `AttentionBackend.forward`."""
        group = plan.metadata.groups[cache.group]
        assert shape.sliding_window == group.sliding_window
        kv_store(key, cache.key, group.slot_mapping, cache.key_scales, cache.scales_of_tokens)
        if value is not None:
            kv_store(value, cache.value, group.slot_mapping, cache.value_scales, cache.scales_of_tokens)
        return self.attend(shape, query, cache, plan)

    def forward_qkv(
        self,
        shape: AttentionShape,
        qkv: torch.Tensor,
        norm: HeadNorm | None,
        cos_sin: RopeCosSin | None,
        cache: KVCache,
        plan: AttentionPlan,
    ) -> torch.Tensor:
        """See `FusedKVBackend`."""
        group = plan.metadata.groups[cache.group]
        assert shape.sliding_window == group.sliding_window
        rope_and_cache(
            qkv,
            shape.num_heads,
            None if norm is None else norm.q_weight,
            None if norm is None else norm.k_weight,
            0.0 if norm is None else norm.eps,
            None if cos_sin is None else cos_sin.cos,
            None if cos_sin is None else cos_sin.sin,
            cos_sin is not None and cos_sin.interleaved,
            cache.key,
            cache.value,
            cache.key_scales,
            cache.value_scales,
            cache.scales_of_tokens,
            group.slot_mapping,
        )
        return self.attend(shape, qkv[:, : shape.num_heads], cache, plan)

    def mla_rope_and_cache(
        self,
        rows: torch.Tensor,
        q_weight: torch.Tensor | None,
        kv_weight: torch.Tensor,
        eps: float,
        cos_sin: RopeCosSin,
        cache: KVCache,
        plan: AttentionPlan,
    ) -> torch.Tensor:
        """See `FusedKVBackend`."""
        queries: torch.Tensor = mla_rope_and_cache(
            rows,
            q_weight,
            kv_weight,
            eps,
            cos_sin.cos,
            cos_sin.sin,
            cos_sin.interleaved,
            cache.key,
            cache.key_scales,
            cache.scales_of_tokens,
            plan.metadata.groups[cache.group].slot_mapping,
        )
        return queries
