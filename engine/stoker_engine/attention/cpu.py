"""Attention by the native CPU kernels. They read keys and values directly from the cache blocks, for any mix of decodes
and chunks, and each row's result has the same bits in every batch. Layers whose parts are all native kernels are
computed in one call, with the same guarantee."""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from stoker_engine.attention.backend import (
    AttentionShape,
    BackendCapabilities,
    KVCache,
    LayerParts,
    RopeCosSin,
    WholeLayers,
)
from stoker_engine.attention.metadata import AttentionMetadata
from stoker_engine.kernels.cpu.activation import kind_of
from stoker_engine.kernels.cpu.attention import AttentionOf, AttentionStep, attention, step_of
from stoker_engine.kernels.cpu.layer import LayerOf, NormOf, RunLayers, layers
from stoker_engine.kernels.cpu.matrix import CpuLinear


@dataclass(frozen=True)
class CpuBackend:
    """Attention on a CPU, in bfloat16 or float32."""

    capabilities: ClassVar[BackendCapabilities] = BackendCapabilities(
        runs_layers=True, batch_invariant=True, has_threads=True
    )

    library: ctypes.CDLL

    def prepare(self, metadata: AttentionMetadata) -> ctypes.Array[AttentionStep]:
        """See `AttentionBackend.prepare`. Returns the kernel's arguments for each group of layers."""
        return (AttentionStep * len(metadata.groups))(
            *(
                step_of(metadata.query_starts, metadata.seq_lens, group.tables, group.slot_mapping, metadata.block_size)
                for group in metadata.groups
            )
        )

    def forward(
        self,
        shape: AttentionShape,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None,
        cache: KVCache,
        plan: ctypes.Array[AttentionStep],
    ) -> torch.Tensor:
        """See `AttentionBackend.forward`."""
        return attention(self.library, _attention_of(shape, cache), query, key, value, plan[cache.group])

    def takes(self, parts: LayerParts) -> bool:
        """See `LayerBackend.takes`."""
        linears = parts.qkv, parts.out, parts.up, parts.down
        is_native = all(isinstance(linear, CpuLinear) for linear in linears)
        return is_native and kind_of(parts.activation) is not None and parts.rotary_dim % 2 == 0

    def layers(self, parts: Sequence[LayerParts]) -> WholeLayers:
        """See `LayerBackend.layers`."""
        made: tuple[list[KVCache], RunLayers] | None = None

        def run(
            x: torch.Tensor,
            cos_sin: Sequence[RopeCosSin],
            plan: ctypes.Array[AttentionStep],
            caches: Sequence[KVCache],
            rows: torch.Tensor | None,
            batch_rows: torch.Tensor | None,
            kept_batch_rows: torch.Tensor | None,
        ) -> torch.Tensor:
            nonlocal made
            if made is None or not all(map(operator.is_, made[0], caches)):
                of = [_layer_of(part, cache) for part, cache in zip(parts, caches, strict=True)]
                made = list(caches), layers(self.library, of)
            pairs = [(each.cos, each.sin) for each in cos_sin]
            return made[1](x, plan, pairs, rows, batch_rows, kept_batch_rows)

        return run


def _layer_of(parts: LayerParts, cache: KVCache) -> LayerOf:
    qkv, out, up, down = parts.qkv, parts.out, parts.up, parts.down
    kind = kind_of(parts.activation)
    assert isinstance(qkv, CpuLinear) and isinstance(out, CpuLinear) and kind is not None
    assert isinstance(up, CpuLinear) and isinstance(down, CpuLinear)
    norms = {name: NormOf(norm.weight, norm.eps) for name, norm in parts.norms.items()}
    heads = parts.head_norm
    return LayerOf(
        dtype=parts.dtype,
        hidden=parts.hidden,
        multiplier=parts.multiplier,
        input_norm=norms.get("input_norm"),
        q_norm=None if heads is None else NormOf(heads.q_weight, heads.eps),
        k_norm=None if heads is None else NormOf(heads.k_weight, heads.eps),
        post_attention_norm=norms.get("post_attention_norm"),
        pre_mlp_norm=norms.get("pre_mlp_norm"),
        post_mlp_norm=norms.get("post_mlp_norm"),
        qkv=qkv,
        out=out,
        up=up,
        down=down,
        pairs=parts.rotary_dim // 2,
        interleaved=parts.interleaved,
        activation=kind,
        gated=parts.gated,
        attention=_attention_of(parts.shape, cache),
        cos_sin=parts.cos_sin,
        group=cache.group,
    )


def _attention_of(shape: AttentionShape, cache: KVCache) -> AttentionOf:
    return AttentionOf(
        shape.num_heads,
        cache.key,
        cache.value,
        cache.key_scales,
        cache.value_scales,
        cache.scales_of_tokens,
        shape.scale,
        shape.sliding_window,
        shape.logits_soft_cap,
        shape.alibi_slopes,
        shape.sinks,
    )
