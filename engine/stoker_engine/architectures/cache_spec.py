"""What one decoder layer keeps in the KV cache of each token it has seen."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CacheSpec:
    """A layer's need of the cache.

        full      keys and values of every token                     sliding_window None
        window    keys and values of the last so many tokens         sliding_window set
        latent    one compressed vector a token, keys and values in one (multi-head latent attention,
                  DeepSeek-V2, 2024): the values are the first `value_head_dim` numbers of the key

    Attributes:
        num_kv_heads: heads of keys and values; 1 where latent.
        head_dim: size of one key.
        value_head_dim: size of one value.
        sliding_window: tokens seen back, the current one included; None sees all.
        latent: values lie within the keys and take no room of their own.
    """

    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    sliding_window: int | None = None
    latent: bool = False

    @property
    def numbers_per_token(self) -> int:
        """How many numbers one token takes."""
        return self.num_kv_heads * (self.head_dim + (0 if self.latent else self.value_head_dim))
