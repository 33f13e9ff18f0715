"""Attention by the package flashinfer (Ye et al., 2025), on the paged cache.

Triton kernels store keys and values. For each kind of layer, the package plans a step on the host and copies the plan
to the device. This happens when the first layer of the kind runs. A plan's page-locked memory belongs to the package's
object, which must not plan again before the device has read it. Steps therefore take turns with two objects.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from stoker_engine.attention.backend import AttentionShape, KVCache
from stoker_engine.attention.fused_kv import FusedKVStoreBackend
from stoker_engine.attention.metadata import AttentionMetadata, BlockTables

#: Size in bytes of the workspace for partial results of split sequences, as recommended by the package.
_WORKSPACE: Final = 128 << 20


class _Kind(NamedTuple):
    """Parameters that layers have in common if they share a plan."""

    group: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    soft_cap: float | None


@dataclass(frozen=True)
class _Plan:
    """A step's metadata, its turn, and the kinds of layers that are already planned."""

    metadata: AttentionMetadata
    is_odd: bool
    planned: set[_Kind] = field(default_factory=set)


class FlashInferBackend(FusedKVStoreBackend):
    """Attention by flashinfer; see the module's docstring.

    Args:
        wrapper: `flashinfer.BatchPrefillWithPagedKVCacheWrapper`.
    """

    def __init__(self, wrapper: Callable[..., Any]) -> None:
        self._wrapper = wrapper
        self._workspace: torch.Tensor | None = None
        self._wrappers: dict[tuple[_Kind, bool], Any] = {}
        self._planned: dict[tuple[_Kind, bool], torch.cuda.Event] = {}
        self._is_odd = False

    def prepare(self, metadata: AttentionMetadata) -> _Plan:
        """See `AttentionBackend.prepare`."""
        self._is_odd = not self._is_odd
        return _Plan(metadata, self._is_odd)

    def attend(self, shape: AttentionShape, query: torch.Tensor, cache: KVCache, plan: _Plan) -> torch.Tensor:
        """See `FusedKVBackend`."""
        kind = _Kind(
            cache.group, shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.scale, shape.logits_soft_cap
        )
        if kind not in plan.planned:
            self._plan(kind, plan, query)
            plan.planned.add(kind)
        out: torch.Tensor = self._wrappers[kind, plan.is_odd].run(query.contiguous(), (cache.key, cache.value))
        return out.flatten(1)

    def _plan(self, kind: _Kind, plan: _Plan, query: torch.Tensor) -> None:
        metadata, key = plan.metadata, (kind, plan.is_odd)
        if self._workspace is None:
            self._workspace = torch.zeros(_WORKSPACE, dtype=torch.uint8, device=query.device)
        if key not in self._wrappers:
            self._wrappers[key] = self._wrapper(self._workspace, "NHD")
        if key in self._planned:
            self._planned[key].synchronize()
        group, size = metadata.groups[kind.group], metadata.block_size
        lengths = metadata.seq_lens_host
        counts = -(-lengths // size)
        self._wrappers[key].plan(
            torch.from_numpy(metadata.query_starts_host.astype(np.int32)),
            torch.from_numpy(np.concatenate([[0], counts.cumsum()]).astype(np.int32)),
            _blocks(group, metadata, int(counts.sum())),
            torch.from_numpy((lengths - (counts - 1) * size).astype(np.int32)),
            kind.num_heads,
            kind.num_kv_heads,
            kind.head_dim,
            size,
            causal=True,
            sm_scale=kind.scale,
            window_left=-1 if group.sliding_window is None else group.sliding_window - 1,
            logits_soft_cap=kind.soft_cap,
            q_data_type=query.dtype,
            kv_data_type=query.dtype,
        )
        if query.is_cuda:
            event = self._planned[key] = torch.cuda.Event()
            event.record()


def _blocks(group: BlockTables, metadata: AttentionMetadata, count: int) -> torch.Tensor:
    """Return the blocks of all sequences, concatenated: int32 [count]. Nothing is read from the device."""
    counts = (metadata.seq_lens + metadata.block_size - 1) // metadata.block_size
    ends = counts.cumsum(0)
    at = torch.arange(count, device=counts.device)
    row = torch.searchsorted(ends, at, right=True)
    return group.tables[row, at - (ends - counts)[row]]
