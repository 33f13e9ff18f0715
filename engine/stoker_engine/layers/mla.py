"""Multi-head latent attention (DeepSeek-V2, 2024), computed over the latents themselves.

A token leaves one latent c in the cache, from which every head's key and value could be made:

    key of head h    k = [ W_UK,h c ; r ]       r: the rotated part, shared by all heads
    value of head h  v = W_UV,h c

Instead of making them anew for every token seen, the matrices are moved to where there are few tokens (absorption):

    score    q · k  =  [ W_UK,hᵀ q_nope ; q_rope ] · [ c ; r ]
    result   Σ p v  =  W_UV,h Σ p c

so attention runs as multi-query attention, one key [c ; r] and one value c for all heads, through any backend.

Slots: ``q``, or ``q_a``, ``q_a_norm`` and ``q_b``; ``kv_a`` and ``kv_a_norm``; ``k_b`` [heads, qk_nope_head_dim,
latent] and ``v_b`` [heads, v_head_dim, latent]; ``o``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from stoker_engine.architectures.mla_config import MLAConfig
from stoker_engine.attention.backend import AttentionBackend, AttentionShape, KVCache
from stoker_engine.attention.metadata import AttentionMetadata
from stoker_engine.kernels.batched_linear import batched_linear
from stoker_engine.layers.linear import MergedLinear
from stoker_engine.layers.norm import RMSNorm
from stoker_engine.quant.slot import Slot

#: Rotates [tokens, heads, qk_rope_head_dim] by the tokens' positions.
Rotate = Callable[[torch.Tensor], torch.Tensor]


class LatentAttention(nn.Module):
    """Latent self-attention of one layer.

    Args:
        scale: the scores are multiplied by it.
        bias: whether the projections into the bottlenecks, and the one out of attention, have biases.
    """

    def __init__(
        self,
        config: MLAConfig,
        hidden_size: int,
        num_heads: int,
        scale: float,
        eps: float,
        bias: bool,
        backend: AttentionBackend,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.config = config
        self.backend = backend
        cache = config.cache
        self.shape = AttentionShape(num_heads, 1, cache.head_dim, cache.value_head_dim, scale)
        bottlenecks = {"kv_a": cache.head_dim}
        self.q_a_norm = None
        if config.q_lora_rank is not None:
            bottlenecks = {"q_a": config.q_lora_rank, **bottlenecks}
            self.q_a_norm = RMSNorm(config.q_lora_rank, eps, dtype)
        self.bottlenecks = MergedLinear(hidden_size, bottlenecks, bias, dtype)
        self.kv_a_norm = RMSNorm(config.kv_lora_rank, eps, dtype)
        query = "q" if config.q_lora_rank is None else "q_b"
        self.query = MergedLinear(
            config.q_lora_rank or hidden_size, {query: num_heads * config.qk_head_dim}, False, dtype
        )
        rank = config.kv_lora_rank
        self.absorb = _empty(num_heads, rank, config.qk_nope_head_dim, dtype=dtype)  # W_UKᵀ
        self.make_value = _empty(num_heads, config.v_head_dim, rank, dtype=dtype)  # W_UV
        self.out = MergedLinear(num_heads * config.v_head_dim, {"o": hidden_size}, bias, dtype)

    def forward(self, x: torch.Tensor, rotate: Rotate, metadata: AttentionMetadata, cache: KVCache) -> torch.Tensor:
        """[tokens, hidden] → [tokens, hidden]."""
        config, heads = self.config, self.shape.num_heads
        queried, latent, key_rope = self.bottlenecks(x).split(
            [config.q_lora_rank or 0, config.kv_lora_rank, config.qk_rope_head_dim], dim=-1
        )
        query = self.query(x if self.q_a_norm is None else self.q_a_norm(queried)).unflatten(-1, (heads, -1))
        nope, rope = query.split([config.qk_nope_head_dim, config.qk_rope_head_dim], dim=-1)
        query = torch.cat((batched_linear(nope, self.absorb), rotate(rope)), dim=-1)  # [tokens, heads, latent + rope]
        key = torch.cat((self.kv_a_norm(latent).unsqueeze(1), rotate(key_rope.unsqueeze(1))), dim=-1)
        attended = self.backend.forward(self.shape, query, key, None, cache, metadata).unflatten(-1, (heads, -1))
        return self.out(batched_linear(attended, self.make_value).flatten(1))

    def slots(self, prefix: str) -> dict[str, Slot]:
        """The places a loader fills, by name."""
        slots = self.kv_a_norm.slots(f"{prefix}.kv_a_norm")
        if self.q_a_norm is not None:
            slots.update(self.q_a_norm.slots(f"{prefix}.q_a_norm"))
        for linear in (self.bottlenecks, self.query, self.out):
            slots.update(linear.slots(prefix))
        slots[f"{prefix}.k_b.weight"] = Slot.whole(self.absorb.data).transpose(1, 2)
        slots[f"{prefix}.v_b.weight"] = Slot.whole(self.make_value.data)
        return slots


def _empty(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)
