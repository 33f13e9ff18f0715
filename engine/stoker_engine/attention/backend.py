"""Interface between models and attention backends: a layer states its shape, a backend computes its attention."""

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
    """Parameters of one layer's attention.

    Attributes:
        num_heads, num_kv_heads: number of query heads, and of key and value heads, on this rank.
        head_dim: size of a query head and of a key head.
        value_head_dim: size of a value head and of each head of the result.
        scale: factor of the scores.
        sliding_window: number of visible tokens, including the current one; None: all.
        logits_soft_cap: scores s become cap × tanh(s / cap) before masks and biases (Gemma 2).
        alibi_slopes: [num_heads] float32; slope × (key position - query position) is added to the scores
            (Press et al., 2022).
        sinks: [num_heads] float32; an additional score per head that takes part in the softmax but has no value (Xiao
            et al., 2023; learned in gpt-oss).
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
    """One layer's view of the paged cache. Blocks are not contiguous: index the tensors, do not flatten them.

    Attributes:
        key: [blocks, block_size, kv_heads, head_dim], in the model's dtype, bfloat16, float8 or int8.
        value: [blocks, block_size, kv_heads, value_head_dim]; for latent attention a view into `key`.
        group: index of the layer's block tables (`AttentionMetadata.groups`).
        key_scales: factors of float8 and int8 keys, [blocks, block_size, kv_heads] float32: either one per token and
            head, or the layer's scale repeated; None for other dtypes.
        value_scales: factors of the values, in the same form; for latent attention the same tensor as `key_scales`.
        scales_of_tokens: whether each token has its own scales, computed when it is stored.
    """

    key: torch.Tensor
    value: torch.Tensor
    group: int
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None
    scales_of_tokens: bool = False


@dataclass(frozen=True, eq=False)
class HeadNorm:
    """RMS norm of each query and key head before rotation.

    Attributes:
        q_weight, k_weight: [head_dim]; see `kernels.rms_norm` for their dtype.
    """

    q_weight: torch.Tensor
    k_weight: torch.Tensor
    eps: float


@dataclass(frozen=True, eq=False)
class RopeCosSin:
    """Cos and sin by which a step's queries and keys are rotated.

    Attributes:
        cos, sin: [tokens, 1, rotary_dim / 2].
        interleaved: see `kernels.rotary.apply_rotary`.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool


#: A backend's plan of a step, made from the step's metadata. Its type differs by backend.
AttentionPlan = Any

#: (x [tokens, hidden], cos and sin by kind, plan, each layer's cache, kept, input-batch rows of the tokens, input-batch
#: rows of the kept tokens) → the residual stream after the layers. `kept` has the indices of the tokens whose result is
#: needed: the result is a new tensor of these tokens. If `kept` is None, x is updated in place and returned. The
#: input-batch rows are int64, or None if no operation needs them.
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
    """RMS norm of the residual stream.

    Attributes:
        weight: [hidden]; see `kernels.rms_norm` for its dtype.
    """

    weight: torch.Tensor
    eps: float


@dataclass(frozen=True, eq=False)
class LayerParts:
    """Parts of a layer that adds first its attention and then its MLP to the residual stream.

    Attributes:
        norms: norms by their names in `architectures.decoder_config`.
        multiplier: factor of the attention's and the MLP's results.
        qkv, out, up, down: linear operations; `up` computes both gate and up if the MLP is gated.
        rotary_dim: number of rotated elements of each head; 0: none.
        cos_sin: index of the rotary embedding's kind; None: no rotation.
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
    """Optional features of a backend.

    Attributes:
        runs_layers: it is a `LayerBackend`.
        captures_steps: it is a `GraphBackend`.
        fuses_kv: it is a `FusedKVBackend`.
        batch_invariant: with ``--batch-invariant``, a row's result has the same bits in every batch.
        has_threads: its kernels have their own threads; torch's threads stay idle.
    """

    runs_layers: bool = False
    captures_steps: bool = False
    fuses_kv: bool = False
    batch_invariant: bool = False
    has_threads: bool = False


class AttentionBackend(Protocol):
    """Causal attention of a flat batch over the paged cache."""

    @property
    def capabilities(self) -> BackendCapabilities:
        """Optional features of the backend; a constant of its class."""
        ...

    def prepare(self, metadata: AttentionMetadata) -> AttentionPlan:
        """Plan a step before its first layer runs. Whatever needs values on the host is computed from the metadata's
        host arrays, so that neither this method nor `forward` waits for the device."""
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
        """Store keys and values, then attend.

        Args:
            query: [tokens, heads, head_dim].
            key: [tokens, kv_heads, head_dim].
            value: [tokens, kv_heads, value_head_dim]; None for latent attention.

        Returns:
            [tokens, heads × value_head_dim], in the query's dtype.
        """
        ...


class LayerBackend(AttentionBackend, Protocol):
    """A backend that computes whole layers."""

    def takes(self, parts: LayerParts) -> bool:
        """Whether the backend can compute this layer in one call."""
        ...

    def layers(self, parts: Sequence[LayerParts]) -> WholeLayers:
        """Return one call for consecutive layers. Its result has the same bits as the separate operations."""
        ...


class GraphBackend(AttentionBackend, Protocol):
    """A backend whose steps, including their plan, can be captured in a CUDA graph: everything that differs between
    steps is read from the metadata's tensors on the device (see `AttentionMetadata.graph_decodes`)."""

    def fits(self, seq_lens: np.ndarray, planned: np.ndarray) -> bool:
        """Whether a plan that was made for decodes of the lengths `planned` can also be used for decodes of `seq_lens`.
        A plan can be used for chunks of any length."""
        ...


class FusedKVBackend(AttentionBackend, Protocol):
    """A backend that fuses the operations between the QKV projection and attention: head norms, RoPE and KV store."""

    def forward_qkv(
        self,
        shape: AttentionShape,
        qkv: torch.Tensor,
        norm: HeadNorm | None,
        cos_sin: RopeCosSin | None,
        cache: KVCache,
        plan: AttentionPlan,
    ) -> torch.Tensor:
        """Apply head norms and RoPE to the result of the QKV projection, store keys and values, and attend.

        Args:
            qkv: [tokens, heads + 2 × kv_heads, head_dim]: queries, keys, values; may be overwritten.

        Returns:
            See `forward`.
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
        """Normalise the bottlenecks of latent attention, rotate the keys' rotary part, and store latents and keys.

        Args:
            rows: [tokens, q + latent + rotary_dim], where q is the size of the queries' bottleneck; 0 if there is none.
            q_weight, kv_weight: weights of the norms; `q_weight` is None if the queries have no bottleneck.

        Returns:
            [tokens, q]: the normalised bottleneck of the queries.
        """
        ...

    def attend(self, shape: AttentionShape, query: torch.Tensor, cache: KVCache, plan: AttentionPlan) -> torch.Tensor:
        """Attend to keys and values that are already stored. Returns: see `forward`."""
        ...


def runs_layers(backend: AttentionBackend) -> TypeGuard[LayerBackend]:
    """Whether the backend computes whole layers."""
    return backend.capabilities.runs_layers


def captures_steps(backend: AttentionBackend) -> TypeGuard[GraphBackend]:
    """Whether the backend's steps can be captured in CUDA graphs."""
    return backend.capabilities.captures_steps


def fuses_kv(backend: AttentionBackend) -> TypeGuard[FusedKVBackend]:
    """Whether the backend fuses RoPE with the store of keys and values."""
    return backend.capabilities.fuses_kv
