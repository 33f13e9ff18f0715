"""The shape of multi-head latent attention (DeepSeek-V2, 2024), with one small vector for a token's keys and values."""

from __future__ import annotations

from dataclasses import dataclass

from stoker_engine.architectures.cache_spec import CacheSpec


@dataclass(frozen=True)
class MLAConfig:
    """Latent attention of a model.

    Attributes:
        q_lora_rank: queries go through a bottleneck of this size; None: one plain projection.
        kv_lora_rank: size of the latent that keys and values are made from.
        qk_nope_head_dim: numbers a head compares without positions.
        qk_rope_head_dim: numbers a head compares with positions; the key's are shared by all heads.
        v_head_dim: numbers of one head's value.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def qk_head_dim(self) -> int:
        """Size of one head's query."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cache(self) -> CacheSpec:
        """What a token keeps: its latent, and the key numbers that carry its position."""
        return CacheSpec(
            num_kv_heads=1,
            head_dim=self.kv_lora_rank + self.qk_rope_head_dim,
            value_head_dim=self.kv_lora_rank,
            latent=True,
        )
