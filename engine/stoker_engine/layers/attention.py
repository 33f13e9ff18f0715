"""Self-attention with grouped key and value heads, and the options that families add to it."""

from __future__ import annotations

import torch
from torch import nn

from stoker_engine.architectures.decoder_config import AttentionConfig, QKNormConfig
from stoker_engine.attention.backend import AttentionBackend, AttentionShape, KVCache
from stoker_engine.attention.metadata import AttentionMetadata
from stoker_engine.layers.linear import MergedLinear
from stoker_engine.layers.norm import Norm, make_norm
from stoker_engine.layers.rotary import Rotation
from stoker_engine.quant.slot import Slot


class Attention(nn.Module):
    """Self-attention of one layer.

    Slots: ``q``, ``k``, ``v``, ``o``, ``q_norm`` and ``k_norm``.
    """

    def __init__(
        self, config: AttentionConfig, hidden_size: int, backend: AttentionBackend, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.backend = backend
        slopes = config.alibi_slopes
        self.shape = AttentionShape(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            value_head_dim=config.head_dim,
            scale=config.scale,
            sliding_window=config.sliding_window,
            logits_soft_cap=config.logits_soft_cap,
            alibi_slopes=None if slopes is None else torch.tensor(slopes, dtype=torch.float32),
        )
        self.heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        width, kv_width, _ = (heads * config.head_dim for heads in self.heads)
        self.qkv = MergedLinear(hidden_size, {"q": width, "k": kv_width, "v": kv_width}, config.qkv_bias, dtype)
        self.out = MergedLinear(width, {"o": hidden_size}, config.out_bias, dtype)
        self.clip_qkv = config.clip_qkv
        self.q_norm = self.k_norm = None
        if config.qk_norm is not None:
            self.full_norm = config.qk_norm.over == "full"
            self.q_norm = _head_norm(config.qk_norm, config.num_heads, config.head_dim, dtype)
            self.k_norm = _head_norm(config.qk_norm, config.num_kv_heads, config.head_dim, dtype)

    def forward(
        self, x: torch.Tensor, rotation: Rotation | None, metadata: AttentionMetadata, cache: KVCache
    ) -> torch.Tensor:
        """[tokens, hidden] → [tokens, hidden]."""
        qkv = self.qkv(x)
        heads, kv_heads, _ = self.heads
        qkv = qkv.view(-1, heads + 2 * kv_heads, self.shape.head_dim)
        value = qkv[:, heads + kv_heads :]
        turned = qkv[:, : heads + kv_heads]  # queries and keys, which share what comes next
        if self.q_norm is not None and self.k_norm is not None:
            turned = self._normalised(turned, self.q_norm, self.k_norm)
        if self.clip_qkv is not None:
            turned, value = (part.clamp(-self.clip_qkv, self.clip_qkv) for part in (turned, value))
        if rotation is not None:
            turned = rotation(turned)
        attended = self.backend.forward(self.shape, turned[:, :heads], turned[:, heads:], value, cache, metadata)
        return self.out(attended)

    __call__ = forward

    def _normalised(self, turned: torch.Tensor, q_norm: Norm, k_norm: Norm) -> torch.Tensor:
        heads, size = self.shape.num_heads, self.shape.head_dim
        query, key = turned[:, :heads], turned[:, heads:]
        if self.full_norm:
            normed = torch.cat((q_norm(query.flatten(1)), k_norm(key.flatten(1))), dim=-1)
            return normed.view(len(turned), -1, size)
        return torch.cat((q_norm(query), k_norm(key)), dim=1)

    def slots(self, prefix: str) -> dict[str, Slot]:
        """The places a loader fills, by name."""
        slots = {**self.qkv.slots(prefix), **self.out.slots(prefix)}
        if self.q_norm is not None and self.k_norm is not None:
            slots.update(self.q_norm.slots(f"{prefix}.q_norm"))
            slots.update(self.k_norm.slots(f"{prefix}.k_norm"))
        return slots


def _head_norm(config: QKNormConfig, heads: int, head_dim: int, dtype: torch.dtype) -> Norm:
    if config.over == "full":
        return make_norm(config.norm, heads * head_dim, dtype)
    return make_norm(config.norm, head_dim, dtype, heads=heads if config.over == "each" else None)
