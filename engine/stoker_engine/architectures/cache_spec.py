"""What one decoder layer keeps of the sequences it has seen: something of each token, or one state of each sequence.

kind "tokens"    CacheSpec    keys and values of every token, or of a window of them     attention
kind "state"     StateSpec    tensors of fixed size, however long the sequence is        Mamba, linear attention
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal


@dataclass(frozen=True)
class CacheSpec:
    """A layer that keeps something of each token.

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

    kind: ClassVar[Literal["tokens"]] = "tokens"

    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    sliding_window: int | None = None
    latent: bool = False

    @property
    def numbers_per_token(self) -> int:
        """How many numbers one token takes."""
        return self.num_kv_heads * (self.head_dim + (0 if self.latent else self.value_head_dim))


@dataclass(frozen=True)
class StateTensor:
    """One tensor of a state.

    Attributes:
        name: what the layer calls it, such as ``conv`` or ``ssm``.
        shape: of one sequence's.
        dtype: None: the model's.
        shard_dim: dimension that tensor-parallel ranks divide among them; None: every rank keeps the whole.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    shard_dim: int | None = None


@dataclass(frozen=True)
class StateSpec:
    """A layer that keeps one state of each sequence, which every token overwrites (vLLM's MambaSpec).

    Mamba (Gu & Dao, 2023)    conv [kernel - 1, channels], ssm [channels, state size]
    Mamba-2 (2024)            conv [kernel - 1, channels + 2 × groups × state size], ssm [heads, head size, state size]
    linear attention          one matrix a head: [heads, key size, value size]
    """

    kind: ClassVar[Literal["state"]] = "state"

    tensors: tuple[StateTensor, ...]


#: What a layer keeps, by its `kind`.
LayerCache = CacheSpec | StateSpec
