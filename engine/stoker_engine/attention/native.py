"""Attention by the CPU's kernels: reads keys and values where they lie in their blocks, whatever the mix of decodes and
chunks, and gives each row the same result in every batch, bit for bit."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from stoker_engine.attention.backend import AttentionShape, KVCache
from stoker_engine.attention.metadata import AttentionMetadata
from stoker_engine.kernels.native.attention import Step, attention, step_of


@dataclass(frozen=True)
class NativeBackend:
    """Attention on a CPU, in bfloat16 or float32."""

    library: ctypes.CDLL

    def prepare(self, metadata: AttentionMetadata) -> list[Step]:
        """See `AttentionBackend.prepare`: each group's part of the kernel's call."""
        return [
            step_of(metadata.query_starts, metadata.seq_lens, group.tables, group.slot_mapping, metadata.block_size)
            for group in metadata.groups
        ]

    def forward(
        self,
        shape: AttentionShape,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None,
        cache: KVCache,
        plan: list[Step],
    ) -> torch.Tensor:
        """See `AttentionBackend.forward`."""
        return attention(
            self.library,
            query,
            key,
            value,
            cache.key,
            cache.value,
            cache.key_scales,
            cache.value_scales,
            cache.scales_of_tokens,
            plan[cache.group],
            shape.scale,
            shape.sliding_window,
            shape.logits_soft_cap,
            shape.alibi_slopes,
            shape.sinks,
        )
