"""What adapters add to one linear operation of the model, by slot.

    LINEAR            y += (x Aᵀ) Bᵀ                        on a CPU lora.cpp's, also within a call of whole layers
    EMBEDDING         y += Aᵀ[token] Bᵀ
    ABSORBED_KEYS     q Wᵀ += (q Bₕ) A        ┐ for each head h: latent attention multiplies queries by the matrix that
    ABSORBED_VALUES   c W  += (c Aᵀ) Bₕᵀ      ┘ makes keys of latents, and results by the one that makes values of them

Where lora.cpp does not compute it, the linear operations of the model's own kernels do, an adapter at a time: on a CPU
a row's result depends on the row and its adapter alone. On a GPU Triton's kernels compute all forms, for all rows and
adapters at once (`slot_stacks`); where these cannot run, torch's operators do, an adapter at a time.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence

import torch

from stoker_common.errors import AdapterError
from stoker_engine.kernels.batched_linear import by_head
from stoker_engine.kernels.bundle import MakeLinear, Operation
from stoker_engine.kernels.cpu.bundle import cpu_kernels
from stoker_engine.kernels.cpu.lora import AdapterMemory, CpuLoraFactors, CpuLoraSite, CpuLoraTable
from stoker_engine.kernels.cpu.matrix import CpuLinear
from stoker_engine.kernels.lora import LoraPart
from stoker_engine.kernels.reference import REFERENCE
from stoker_engine.layers.batch_rows import BatchRows, RowSpace
from stoker_engine.layers.linear_site import LinearSite, SiteForm
from stoker_engine.lora.adapter import Adapter, Factors
from stoker_engine.lora.slot_stacks import SlotStacks, StackShape
from stoker_engine.quant.prepack import resolve_prepack


class AdaptedSite:
    """A linear operation's site, and what the adapters in the slots add there.

    Args:
        rows: the rows of the batch.
        device: that computes.
        table, library: of the CPU's kernels; None: torch's operators compute.
        make_stacks: makes room for the slots' matrices of an operation of this shape, where they are multiplied for all
            rows at once; None: they are not.
        is_changeable: whether adapters may change the matrix of this name.
    """

    def __init__(
        self,
        site: LinearSite,
        rows: BatchRows,
        device: torch.device,
        table: CpuLoraTable | None,
        library: ctypes.CDLL | None,
        make_stacks: Callable[[StackShape], SlotStacks] | None = None,
        is_changeable: Callable[[str], bool] = lambda name: True,
    ) -> None:
        self.site, self._rows, self._device, self._make_stacks = site, rows, device, make_stacks
        self._is_changeable = is_changeable
        self._stacks: SlotStacks | None = None
        self._by_slot: dict[int, SiteFactors] = {}
        self._native = None
        if site.form is SiteForm.LINEAR and library is not None and table is not None:
            self._native = CpuLoraSite(library, table)
        self._linear = (REFERENCE if library is None else cpu_kernels(library)).linear
        self._operations: list[_AdaptedOperation] = []

    def cut(self, adapter: Adapter, memory: AdapterMemory | None) -> SiteFactors | None:
        """What an adapter adds here, of this rank's part of the matrix; None: nothing.

        Args:
            memory: where the CPU's kernels compute, of the adapter's matrices for them.

        Raises:
            AdapterError: adapters may not change it.
        """
        parts, first, cut_rows = list[LoraPart](), 0, dict[int, torch.Tensor]()
        for name, outputs in self.site.outputs.items():
            factors = adapter.factors.get(name)
            if factors is not None:
                if not self._is_changeable(name):
                    raise AdapterError(f"it changes {name}, for which --lora-target-modules leaves no room")
                if id(factors.a) not in cut_rows:
                    cut_rows[id(factors.a)] = _cut(factors, self.site)
                b = factors.b if outputs.is_whole else factors.b[outputs.positions]
                parts.append(LoraPart(cut_rows[id(factors.a)], b.contiguous(), first))
            first += outputs.size
        if not parts:
            return None
        if self._native is None or memory is None:
            if self._device.type == "cuda":  # from where they are copied beside what the device does
                parts = [LoraPart(part.a.pin_memory(), part.b.pin_memory(), part.first_output) for part in parts]
            return SiteFactors(self.site.form, parts, self._linear)
        return self.packed(CpuLoraFactors(parts, memory))

    def packed(self, factors: CpuLoraFactors) -> SiteFactors:
        """Return factors that are packed for the CPU's kernel."""
        return SiteFactors(self.site.form, (), self._linear, factors)

    def set(self, slot: int, factors: SiteFactors | None) -> None:
        """Has a slot add `factors` from the next step on; None: nothing."""
        if self._make_stacks is not None:
            if self._stacks is None and factors is not None:
                self._stacks = self._make_stacks(self._shape(factors.width))
            if self._stacks is not None:
                self._stacks.set(slot, () if factors is None else factors.parts)
        elif factors is None:
            self._by_slot.pop(slot, None)
        else:
            self._by_slot[slot] = factors.on(self._device)
        if self._native is not None:
            self._native.set(slot, None if factors is None else factors.native)

    def extended(self, linear: Operation) -> Operation:
        """The operation with what is added to it."""
        if isinstance(linear, CpuLinear) and self._native is not None:
            return self._native.extended(linear, lambda: self._rows[self.site.space])
        if not any(map(self._is_changeable, self.site.outputs)):
            return linear
        adapted = _AdaptedOperation(linear, self._added)
        self._operations.append(adapted)
        return adapted

    def _shape(self, width: int) -> StackShape:
        """Of what adapters may change here.

        Args:
            width: outputs of a head, where the matrix is absorbed.
        """
        form, inner = self.site.form, self.site.inputs.size
        if form in (SiteForm.ABSORBED_KEYS, SiteForm.ABSORBED_VALUES):
            [heads] = self.site.outputs.values()
            return StackShape(form, heads.size, inner, ((0, width),))
        parts, first = list[tuple[int, int]](), 0
        for name, outputs in self.site.outputs.items():
            if self._is_changeable(name):
                parts.append((first, outputs.size))
            first += outputs.size
        return StackShape(form, 1, inner, tuple(parts))

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
        if not self._rows.has_adapters:
            return
        if self._make_stacks is not None:
            # Before an adapter changes it, so that a CUDA graph of it adds what later ones do. Those of experts, which
            # no graph computes, have room once they need it.
            if self._stacks is None and self.site.space is not RowSpace.EXPERTS:
                self._stacks = self._make_stacks(self._shape(y.shape[-1]))
            if self._stacks is not None:
                self._stacks.add(y, x, self._rows, self.site.space)
            return
        slots = self._rows.adapters_of(self.site.space)
        for slot in sorted(set(slots.tolist()) & set(self._by_slot)):
            rows = (slots == slot).nonzero().squeeze(1)
            taken = x[rows]
            for columns, operation in self._by_slot[slot].operations:
                y[rows, columns] += operation(taken).to(y.dtype)


class SiteFactors:
    """What an adapter adds to one operation on this rank.

    Args:
        form: of the operation.
        parts: of the matrices merged into the operation; of forms but LINEAR, one, with `Factors`' own shapes (the
            embedding's A is [vocabulary, rank]).
        linear: makes linear operations of matrices.
        native: the parts in the order of the CPU's kernel, instead; None: it does not compute them.
    """

    def __init__(
        self, form: SiteForm, parts: Sequence[LoraPart], linear: MakeLinear, native: CpuLoraFactors | None = None
    ) -> None:
        self._form, self.parts, self._linear, self.native = form, parts, linear, native

    @functools.cached_property
    def operations(self) -> list[tuple[slice, Operation]]:
        """What is added to which columns of the operation's result; of a result by head, to all heads."""
        return [
            (
                slice(first, first + len(b)) if self._form is SiteForm.LINEAR else slice(None),
                _FORMS[self._form](a, b, self._linear),
            )
            for a, b, first in self.parts
        ]

    def on(self, device: torch.device) -> SiteFactors:
        """The same on a device; copies go on when this returns."""
        if device.type == "cpu":
            return self
        copies: dict[int, torch.Tensor] = {}
        for tensor in (each for part in self.parts for each in (part.a, part.b)):
            copies[id(tensor)] = tensor.to(device, non_blocking=True)
        parts = [LoraPart(copies[id(a)], copies[id(b)], first) for a, b, first in self.parts]
        return SiteFactors(self._form, parts, self._linear)

    @property
    def width(self) -> int:
        """Outputs of a head, where the operation's matrix is absorbed."""
        a, b, _ = self.parts[0]
        return a.shape[1] if self._form is SiteForm.ABSORBED_KEYS else b.shape[-2]

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
        return (factors.a if site.inputs.is_whole else factors.a[:, site.inputs.positions]).contiguous()
    return factors.a


def _linear(a: torch.Tensor, b: torch.Tensor, linear: MakeLinear) -> Operation:
    shrink, expand = linear(a), linear(b)
    return lambda x: expand(shrink(x.to(a.dtype)))


def _embedding(a: torch.Tensor, b: torch.Tensor, linear: MakeLinear) -> Operation:
    expand = linear(b)
    return lambda tokens: expand(a[tokens])


def _absorbed_keys(a: torch.Tensor, b: torch.Tensor, linear: MakeLinear) -> Operation:
    """[rows, heads, keys] → [rows, heads, latent]."""
    heads, expand = by_head([linear(head.T.contiguous()) for head in b]), linear(a.T.contiguous())
    return lambda query: expand(heads(query.to(a.dtype)))


def _absorbed_values(a: torch.Tensor, b: torch.Tensor, linear: MakeLinear) -> Operation:
    """[rows, heads, latent] → [rows, heads, values]."""
    shrink, heads = linear(a), by_head([linear(head) for head in b])
    return lambda latents: heads(shrink(latents.to(a.dtype)))


_FORMS: Mapping[SiteForm, Callable[[torch.Tensor, torch.Tensor, MakeLinear], Operation]] = {
    SiteForm.LINEAR: _linear,
    SiteForm.EMBEDDING: _embedding,
    SiteForm.ABSORBED_KEYS: _absorbed_keys,
    SiteForm.ABSORBED_VALUES: _absorbed_values,
}
