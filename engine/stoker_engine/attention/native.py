"""Attention by the CPU's kernels: reads keys and values where they lie in their blocks, whatever the mix of decodes and
chunks, and gives each row the same result in every batch, bit for bit. So do whole layers, where all parts of one are
such kernels."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from stoker_engine.attention.backend import Angles, AttentionShape, KVCache, LayerParts, WholeLayer
from stoker_engine.attention.metadata import AttentionMetadata
from stoker_engine.kernels.native.activation import kind_of
from stoker_engine.kernels.native.attention import AttentionOf, AttentionStep, attention, step_of
from stoker_engine.kernels.native.layer import LayerOf, NormOf, RunLayer, layer
from stoker_engine.kernels.native.matrix import NativeProduct


@dataclass(frozen=True)
class NativeBackend:
    """Attention on a CPU, in bfloat16 or float32."""

    library: ctypes.CDLL

    def prepare(self, metadata: AttentionMetadata) -> list[AttentionStep]:
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
        plan: list[AttentionStep],
    ) -> torch.Tensor:
        """See `AttentionBackend.forward`."""
        return attention(self.library, _attention_of(shape, cache), query, key, value, plan[cache.group])

    def layer(self, parts: LayerParts) -> WholeLayer | None:
        """See `LayerBackend.layer`."""
        qkv, out, up, down = parts.qkv, parts.out, parts.up, parts.down
        kind = kind_of(parts.activation)
        if not (isinstance(qkv, NativeProduct) and isinstance(out, NativeProduct)) or kind is None:
            return None
        if not (isinstance(up, NativeProduct) and isinstance(down, NativeProduct)) or parts.rotary_dim % 2:
            return None
        norms = {name: NormOf(norm.weight, norm.eps) for name, norm in parts.norms.items()}
        heads = parts.head_norm

        def on(cache: KVCache) -> RunLayer:
            of = LayerOf(
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
            )
            return layer(self.library, of)

        made: tuple[KVCache, RunLayer] | None = None

        def run(
            x: torch.Tensor,
            angles: Angles | None,
            plan: list[AttentionStep],
            cache: KVCache,
            rows: torch.Tensor | None,
        ) -> torch.Tensor:
            nonlocal made
            if made is None or made[0] is not cache:
                made = cache, on(cache)
            cos, sin = (None, None) if angles is None else (angles.cos, angles.sin)
            return made[1](x, plan[cache.group], cos, sin, rows)

        return run


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
