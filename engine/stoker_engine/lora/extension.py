"""What adapters add to one linear operation of the model, by slot.

    LINEAR            y += (x Aᵀ) Bᵀ                        on a CPU lora.cpp's, also within a call of whole layers
    EMBEDDING         y += Aᵀ[token] Bᵀ
    ABSORBED_KEYS     q Wᵀ += (q Bₕ) A        ┐ for each head h: latent attention multiplies queries by the matrix that
    ABSORBED_VALUES   c W  += (c Aᵀ) Bₕᵀ      ┘ makes keys of latents, and results by the one that makes values of them

Where no kernel computes it, torch's operators do, an adapter at a time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from stoker_engine.kernels.bundle import Operation
from stoker_engine.kernels.cpu.lora import AdapterMemory, CpuLoraFactors, CpuLoraSite, CpuLoraTable
from stoker_engine.kernels.cpu.matrix import CpuLinear
from stoker_engine.kernels.lora import LoraPart, add_lora
from stoker_engine.layers.batch_rows import BatchRows
from stoker_engine.layers.linear_site import LinearSite, SiteForm
from stoker_engine.lora.adapter import Adapter, Factors
from stoker_engine.quant.prepack import resolve_prepack


class AdaptedSite:
    """A linear operation's site, and what the adapters in the slots add there.

    Args:
        rows: the rows of the batch.
        device: that computes.
        table, library: of the CPU's kernels; None: torch's operators compute.
    """

    def __init__(
        self,
        site: LinearSite,
        rows: BatchRows,
        device: torch.device,
        table: CpuLoraTable | None,
        library: ctypes.CDLL | None,
    ) -> None:
        self.site, self._rows, self._device = site, rows, device
        self._by_slot: dict[int, SiteFactors] = {}
        self._native = None
        if site.form is SiteForm.LINEAR and library is not None and table is not None:
            self._native = CpuLoraSite(library, table)
        self._library = library
        self._operations: list[_AdaptedOperation] = []

    def cut(self, adapter: Adapter, memory: AdapterMemory) -> SiteFactors | None:
        """What an adapter adds here, of this rank's part of the matrix, in `memory`; None: nothing."""
        parts, first, cut_rows = list[LoraPart](), 0, dict[int, torch.Tensor]()
        for name, outputs in self.site.outputs.items():
            factors = adapter.factors.get(name)
            if factors is not None:
                if id(factors.a) not in cut_rows:
                    cut_rows[id(factors.a)] = _cut(factors, self.site)
                parts.append(LoraPart(cut_rows[id(factors.a)], factors.b[outputs.positions].contiguous(), first))
            first += outputs.size
        if not parts:
            return None
        if self._native is None or self._library is None:
            if self._device.type == "cuda":  # from where they are copied beside what the device does
                parts = [LoraPart(part.a.pin_memory(), part.b.pin_memory(), part.first_output) for part in parts]
            return SiteFactors(parts)
        return SiteFactors((), CpuLoraFactors(self._library, parts, memory.empty))

    def set(self, slot: int, factors: SiteFactors | None) -> None:
        """Has a slot add `factors` from the next step on; None: nothing."""
        if factors is None:
            self._by_slot.pop(slot, None)
        else:
            self._by_slot[slot] = factors.on(self._device)
        if self._native is not None:
            self._native.set(slot, None if factors is None else factors.native)

    def extended(self, linear: Operation) -> Operation:
        """The operation with what is added to it."""
        if isinstance(linear, CpuLinear) and self._native is not None:
            return self._native.extended(linear, lambda: self._rows[self.site.space])
        adapted = _AdaptedOperation(linear, self._added)
        self._operations.append(adapted)
        return adapted

    def settle(self) -> None:
        """Has kernels compute what is extended, where there are some, now that matrices are packed."""
        resolved = [resolve_prepack(adapted.linear) for adapted in self._operations]
        if not all(isinstance(linear, CpuLinear) for linear in resolved):
            self._native = None  # such as a router's, which computes in float32
            return
        for adapted, linear in zip(self._operations, resolved, strict=True):
            adapted.operation = self.extended(linear)

    def _added(self, y: torch.Tensor, x: torch.Tensor) -> None:
        """Adds to y, the operation's result for x."""
        if not self._by_slot:
            return
        slots = self._rows.adapters_of(self.site.space)
        if self.site.form is SiteForm.LINEAR:
            add_lora(y, x, slots, {slot: factors.parts for slot, factors in self._by_slot.items()})
            return
        for slot in sorted(set(slots.tolist()) & set(self._by_slot)):
            rows = (slots == slot).nonzero().squeeze(1)
            for a, b, _ in self._by_slot[slot].parts:
                y[rows] += _FORMS[self.site.form](x[rows], a, b).to(y.dtype)


@dataclass(frozen=True, eq=False)
class SiteFactors:
    """What an adapter adds to one operation on this rank.

    Attributes:
        parts: of the matrices merged into the operation; of forms but LINEAR, one, with `Factors`' own shapes (the
            embedding's A is [vocabulary, rank]).
        native: the same in the order of the CPU's kernel, instead; None: torch's operators compute.
    """

    parts: Sequence[LoraPart]
    native: CpuLoraFactors | None = None

    def on(self, device: torch.device) -> SiteFactors:
        """The same on a device; copies go on when this returns."""
        if device.type == "cpu":
            return self
        copies: dict[int, torch.Tensor] = {}
        for tensor in (each for part in self.parts for each in (part.a, part.b)):
            copies[id(tensor)] = tensor.to(device, non_blocking=True)
        return SiteFactors([LoraPart(copies[id(a)], copies[id(b)], first) for a, b, first in self.parts])

    @property
    def num_bytes(self) -> int:
        """Of its matrices."""
        tensors = {id(tensor): tensor for part in self.parts for tensor in (part.a, part.b)}
        return sum(tensor.nbytes for tensor in tensors.values()) + (self.native.num_bytes if self.native else 0)


class _AdaptedOperation:
    """A linear operation, and what is added to its result."""

    def __init__(self, linear: Operation, added: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        self.linear, self._added = linear, added
        self.operation: Operation | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `Products.linear`."""
        if self.operation is not None:
            return self.operation(x)
        y = self.linear(x)
        self._added(y, x)
        return y


def _cut(factors: Factors, site: LinearSite) -> torch.Tensor:
    """A's columns of this rank's inputs."""
    if site.form is SiteForm.EMBEDDING:
        return factors.a.T.contiguous()
    if site.form is SiteForm.LINEAR:
        return factors.a[:, site.inputs.positions].contiguous()
    return factors.a


def _embedding(tokens: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a[tokens] @ b.T


def _absorbed_keys(query: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[rows, heads, keys] → [rows, heads, latent]."""
    return torch.einsum("thk,hkr->thr", query.to(a.dtype), b) @ a


def _absorbed_values(latents: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[rows, heads, latent] → [rows, heads, values]."""
    return torch.einsum("thr,hvr->thv", latents.to(a.dtype) @ a.T, b)


_FORMS = {
    SiteForm.EMBEDDING: _embedding,
    SiteForm.ABSORBED_KEYS: _absorbed_keys,
    SiteForm.ABSORBED_VALUES: _absorbed_values,
}
