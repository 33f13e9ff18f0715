"""What lies between a layer's product and its attention, by Triton's kernels: norm of heads, turn, storing."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from stoker_engine.attention.backend import Angles, AttentionPlan, AttentionShape, HeadNorm, KVCache
from stoker_engine.attention.metadata import AttentionMetadata
from stoker_engine.kernels.triton.attention.kv_store import kv_store
from stoker_engine.kernels.triton.attention.mla_rope_and_cache import store_latent
from stoker_engine.kernels.triton.attention.rope_and_cache import turn_and_store


class StoringBackend(ABC):
    """A `FusingBackend` that has yet to attend. Its plans have the step's `metadata`."""

    @abstractmethod
    def prepare(self, metadata: AttentionMetadata) -> AttentionPlan:
        """See `AttentionBackend.prepare`."""

    @abstractmethod
    def attend(self, shape: AttentionShape, query: torch.Tensor, cache: KVCache, plan: AttentionPlan) -> torch.Tensor:
        """See `FusingBackend`."""

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
        angles: Angles | None,
        cache: KVCache,
        plan: AttentionPlan,
    ) -> torch.Tensor:
        """See `FusingBackend`."""
        group = plan.metadata.groups[cache.group]
        assert shape.sliding_window == group.sliding_window
        turn_and_store(
            qkv,
            shape.num_heads,
            None if norm is None else norm.q_weight,
            None if norm is None else norm.k_weight,
            0.0 if norm is None else norm.eps,
            None if angles is None else angles.cos,
            None if angles is None else angles.sin,
            angles is not None and angles.interleaved,
            cache.key,
            cache.value,
            cache.key_scales,
            cache.value_scales,
            cache.scales_of_tokens,
            group.slot_mapping,
        )
        return self.attend(shape, qkv[:, : shape.num_heads], cache, plan)

    def store_latent(
        self,
        rows: torch.Tensor,
        q_weight: torch.Tensor | None,
        kv_weight: torch.Tensor,
        eps: float,
        angles: Angles,
        cache: KVCache,
        plan: AttentionPlan,
    ) -> torch.Tensor:
        """See `FusingBackend`."""
        queries: torch.Tensor = store_latent(
            rows,
            q_weight,
            kv_weight,
            eps,
            angles.cos,
            angles.sin,
            angles.interleaved,
            cache.key,
            cache.key_scales,
            cache.scales_of_tokens,
            plan.metadata.groups[cache.group].slot_mapping,
        )
        return queries
