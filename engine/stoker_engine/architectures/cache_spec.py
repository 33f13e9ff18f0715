"""Cache of one decoder layer: an entry per token, or one state per sequence.

kind "tokens"    CacheSpec    keys and values of all tokens, or of those in a window     attention
kind "state"     StateSpec    tensors of fixed size, for any sequence length             Mamba, linear attention
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal


@dataclass(frozen=True)
class CacheSpec:
    """Cache of a layer that stores an entry per token.

        full      keys and values of every token                     sliding_window None
        window    keys and values of the last tokens                 sliding_window set
        latent    one compressed vector per token for keys and values (multi-head latent attention,
                  DeepSeek-V2, 2024): the values are the first `value_head_dim` elements of the key

    Attributes:
        num_kv_heads: number of key and value heads; 1 if latent.
        head_dim: size of one key head.
        value_head_dim: size of one value head.
        sliding_window: number of visible tokens, including the current one; None: all.
        latent: values are part of the keys and need no additional space.
    """

    kind: ClassVar[Literal["tokens"]] = "tokens"

    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    sliding_window: int | None = None
    latent: bool = False

    @property
    def numbers_per_token(self) -> int:
        """Number of cached elements per token."""
        return self.num_kv_heads * (self.head_dim + (0 if self.latent else self.value_head_dim))


@dataclass(frozen=True)
class StateTensor:
    """One tensor of a state.

    Attributes:
        name: the layer's name of the tensor, such as ``conv`` or ``ssm``.
        shape: unsharded shape for one sequence.
        dtype: None: the model's dtype.
        shard_dim: dimension that is split across tensor-parallel ranks; None: replicated on every rank.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    shard_dim: int | None = None


@dataclass(frozen=True)
class StateSpec:
    """Cache of a layer that keeps one state per sequence, updated by every token (vLLM's MambaSpec).

    Mamba (Gu & Dao, 2023)    conv [kernel - 1, channels], ssm [channels, state size]
    Mamba-2 (2024)            conv [kernel - 1, channels + 2 × groups × state size], ssm [heads, head size, state size]
    linear attention          one matrix per head: [heads, key size, value size]
    """

    kind: ClassVar[Literal["state"]] = "state"

    tensors: tuple[StateTensor, ...]


#: Cache of a layer; `kind` distinguishes the classes.
LayerCache = CacheSpec | StateSpec
