"""Shape of multi-head latent attention (DeepSeek-V2, 2024), which caches one small vector per token."""

from __future__ import annotations

from dataclasses import dataclass

from stoker_engine.architectures.cache_spec import CacheSpec


@dataclass(frozen=True)
class MLAConfig:
    """Latent attention of a model.

    Attributes:
        q_lora_rank: size of the queries' low-rank bottleneck; None: a single projection.
        kv_lora_rank: size of the latent from which keys and values are computed.
        qk_nope_head_dim: size of the part of a query or key head that is not rotated.
        qk_rope_head_dim: size of the rotated part; all heads share the key's rotated part.
        v_head_dim: size of a value head.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def qk_head_dim(self) -> int:
        """Size of a query head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cache(self) -> CacheSpec:
        """Cache entry of one token: its latent and the rotated part of its key."""
        return CacheSpec(
            num_kv_heads=1,
            head_dim=self.kv_lora_rank + self.qk_rope_head_dim,
            value_head_dim=self.kv_lora_rank,
            latent=True,
        )
