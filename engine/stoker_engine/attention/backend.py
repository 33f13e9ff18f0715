"""The seam between models and attention: a layer states its shape, a backend computes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

import numpy as np
import torch

from stoker_engine.architectures.activation import Activation
from stoker_engine.attention.metadata import AttentionMetadata
from stoker_engine.kernels.bundle import Operation


@dataclass(frozen=True, eq=False)
class AttentionShape:
    """What is fixed for one layer.

    Attributes:
        head_dim: size of a query and of a key.
        value_head_dim: size of a value, and of each head of the result.
        scale: the scores are multiplied by it.
        sliding_window: tokens seen back, the current one included; None sees all.
        logits_soft_cap: scores s become cap × tanh(s / cap) before masks and biases (Gemma 2).
        alibi_slopes: [num_heads] float32; slope × (key position - query position) is added to the scores
            (Press et al., 2022).
        sinks: [num_heads] float32; a score for each head that takes its part of the weights and has no value (Xiao et
            al., 2023; learned in gpt-oss).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    scale: float
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None


@dataclass(frozen=True)
class KVCache:
    """One layer's view of the paged cache. Blocks lie apart by more than their own size: index, don't flatten.

    Attributes:
        key: [blocks, block_size, kv_heads, head_dim], in the model's dtype, bfloat16, float8 or int8.
        value: [blocks, block_size, kv_heads, value_head_dim]; where the layer is latent, a view into `key`.
        group: index of the block tables that the layer goes by (`AttentionMetadata.groups`).
        key_scales: what float8 and int8 keys are multiplied by, [blocks, block_size, kv_heads] float32: a layer's own
            repeated, or one a token and head; None where the dtype is another.
        value_scales: in the same way; where the layer is latent, the same.
        scales_of_tokens: each token has its own, which is made when it is stored.
    """

    key: torch.Tensor
    value: torch.Tensor
    group: int
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None
    scales_of_tokens: bool = False


@dataclass(frozen=True, eq=False)
class HeadNorm:
    """A norm by root mean square that each head of queries and of keys has before it is rotated.

    Attributes:
        q_weight, k_weight: [head_dim]; see `kernels.rms_norm` for their dtype.
    """

    q_weight: torch.Tensor
    k_weight: torch.Tensor
    eps: float


@dataclass(frozen=True, eq=False)
class RopeCosSin:
    """By which a step's queries and keys are rotated.

    Attributes:
        cos, sin: [tokens, 1, rotary_dim / 2].
        interleaved: see `kernels.rotary.apply_rotary`.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool


#: What a backend makes of a step's metadata; each has its own.
AttentionPlan = Any

#: (x [tokens, hidden], cos and sin by kind, plan, each layer's cache, rows, the rows of the input batch that tokens and
#: `rows` belong to, int64 or None where no operation depends on them) → the residual stream behind them, x itself; or,
#: of these rows alone, a new one.
WholeLayers = Callable[
    [
        torch.Tensor,
        Sequence[RopeCosSin],
        AttentionPlan,
        Sequence[KVCache],
        torch.Tensor | None,
        torch.Tensor | None,
        torch.Tensor | None,
    ],
    torch.Tensor,
]


@dataclass(frozen=True, eq=False)
class NormParts:
    """A norm by root mean square over the residual stream.

    Attributes:
        weight: [hidden]; see `kernels.rms_norm` for its dtype.
    """

    weight: torch.Tensor
    eps: float


@dataclass(frozen=True, eq=False)
class LayerParts:
    """What a layer is computed from that adds its attention to the residual stream, and then its MLP.

    Attributes:
        norms: by the names of `architectures.decoder_config`.
        multiplier: attention's and the MLP's results are multiplied by it.
        qkv, out, up, down: the linear operations; `up` makes gates and ups where the MLP has gates.
        rotary_dim: how many elements of each head are rotated; 0: none.
        cos_sin: the kind of cos and sin by which they are rotated; None: no rotation.
        interleaved: see `kernels.rotary.apply_rotary`.
    """

    dtype: torch.dtype
    hidden: int
    norms: Mapping[str, NormParts]
    multiplier: float
    shape: AttentionShape
    head_norm: HeadNorm | None
    qkv: Operation
    out: Operation
    up: Operation
    down: Operation
    rotary_dim: int
    cos_sin: int | None
    interleaved: bool
    activation: Activation
    gated: bool


@dataclass(frozen=True)
class BackendCapabilities:
    """What a backend offers beside `AttentionBackend`.

    Attributes:
        runs_layers: it is a `LayerBackend`.
        captures_decodes: it is a `GraphBackend`.
        fuses_kv: it is a `FusedKVBackend`.
        batch_invariant: a row has the same bits in every batch, at least in a form of it (``--batch-invariant``).
        has_threads: it belongs to kernels that divide a layer's work among threads themselves; torch's stay idle.
    """

    runs_layers: bool = False
    captures_decodes: bool = False
    fuses_kv: bool = False
    batch_invariant: bool = False
    has_threads: bool = False


class AttentionBackend(Protocol):
    """Computes causal attention of a flat batch against the paged cache."""

    @property
    def capabilities(self) -> BackendCapabilities:
        """What else the backend offers; a constant of its class."""
        ...

    def prepare(self, metadata: AttentionMetadata) -> AttentionPlan:
        """Plans a step, before any layer runs: all that its layers share is made here, and nothing in `forward` reads
        from the device."""
        ...

    def forward(
        self,
        shape: AttentionShape,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None,
        cache: KVCache,
        plan: AttentionPlan,
    ) -> torch.Tensor:
        """Stores `key` [tokens, kv_heads, head_dim] and `value` [tokens, kv_heads, value_head_dim] (None where the
        layer is latent), then attends with `query` [tokens, heads, head_dim].

        Returns:
            [tokens, heads × value_head_dim], in the query's dtype.
        """
        ...


class LayerBackend(AttentionBackend, Protocol):
    """One that computes whole layers."""

    def takes(self, parts: LayerParts) -> bool:
        """Whether it can compute such a layer as a whole."""
        ...

    def layers(self, parts: Sequence[LayerParts]) -> WholeLayers:
        """Layers that follow each other as one call, with the bits of their operations one by one."""
        ...


class GraphBackend(AttentionBackend, Protocol):
    """One whose plan of decodes can be made and attended by in a CUDA graph: what differs from step to step it reads
    from the metadata's tensors on the device."""

    def fits(self, seq_lens: np.ndarray, planned: np.ndarray) -> bool:
        """Whether a plan of decodes has room for `seq_lens` that was made where `seq_lens_host` was `planned`."""
        ...


class FusedKVBackend(AttentionBackend, Protocol):
    """One that does in a pass what lies between a layer's QKV projection and its attention."""

    def forward_qkv(
        self,
        shape: AttentionShape,
        qkv: torch.Tensor,
        norm: HeadNorm | None,
        cos_sin: RopeCosSin | None,
        cache: KVCache,
        plan: AttentionPlan,
    ) -> torch.Tensor:
        """`forward` of what a layer's QKV projection gives, with the norm of its heads and RoPE.

        Args:
            qkv: [tokens, heads + 2 × kv_heads, head_dim]: queries, keys, values; may be written into.
        """
        ...

    def mla_rope_and_cache(
        self,
        rows: torch.Tensor,
        q_weight: torch.Tensor | None,
        kv_weight: torch.Tensor,
        eps: float,
        cos_sin: RopeCosSin,
        cache: KVCache,
        plan: AttentionPlan,
    ) -> torch.Tensor:
        """Norms the bottlenecks of latent attention, rotates the keys' own part, and stores latents and keys.

        Args:
            rows: [tokens, q + latent + rotary_dim].
            q_weight, kv_weight: of the norms; None where queries have no bottleneck, and q is 0.

        Returns:
            [tokens, q]: the queries' bottleneck, normed.
        """
        ...

    def attend(self, shape: AttentionShape, query: torch.Tensor, cache: KVCache, plan: AttentionPlan) -> torch.Tensor:
        """`forward` where everything is stored already."""
        ...


def runs_layers(backend: AttentionBackend) -> TypeGuard[LayerBackend]:
    """Whether the backend computes whole layers."""
    return backend.capabilities.runs_layers


def captures_decodes(backend: AttentionBackend) -> TypeGuard[GraphBackend]:
    """Whether the backend's decodes can be captured in CUDA graphs."""
    return backend.capabilities.captures_decodes


def fuses_kv(backend: AttentionBackend) -> TypeGuard[FusedKVBackend]:
    """Whether the backend fuses RoPE with the store of keys and values."""
    return backend.capabilities.fuses_kv
