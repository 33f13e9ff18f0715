"""Application of the adapters in the slots to one linear operation of the model.

    LINEAR            y += (x Aᵀ) Bᵀ
    EMBEDDING         y += Aᵀ[token] Bᵀ
    ABSORBED_KEYS     q Wᵀ += (q Bₕ) A        ┐ for each head h: latent attention multiplies queries by the matrix that
    ABSORBED_VALUES   c W  += (c Aᵀ) Bₕᵀ      ┘ maps latents to keys, and its result c by the one that maps to values

On a CPU, lora.cpp computes LINEAR, also within native calls of whole layers. The other forms, and operations that
lora.cpp cannot compute, use the CPU kernels' linear operations (or torch's, if there are no CPU kernels), one adapter
after the other. With the CPU kernels, a row's bits depend only on the row and its adapter. On a GPU, Triton's kernels
compute all forms, for all rows and adapters at once (`slot_stacks`); if Triton cannot run, torch's operators compute
one adapter after the other.
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
    """A linear operation's site with the adapters in the slots.

    Args:
        device: device of the model.
        table, library: slots and library of the CPU's kernels; None: the CPU's kernels are not used.
        make_stacks: allocates the matrices of all slots for an operation of this shape, if kernels compute all rows at
            once; None: adapters are computed one after the other.
        is_changeable: parameter name without ``.weight`` → whether adapters may change the matrix.
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
        """Return this rank's shard of an adapter's matrices for the site, or None if the adapter does not change it.

        Args:
            memory: memory of the adapter for the CPU's kernels; None: they are not used.

        Raises:
            AdapterError: adapters may not change one of the site's matrices.
        """
        parts, first, cut_rows = list[LoraPart](), 0, dict[int, torch.Tensor]()
        for name, outputs in self.site.outputs.items():
            factors = adapter.factors.get(name)
            if factors is not None:
                if not self._is_changeable(name):
                    raise AdapterError(f"it changes {name}, which --lora-target-modules does not include")
                if id(factors.a) not in cut_rows:
                    cut_rows[id(factors.a)] = _cut(factors, self.site)
                b = factors.b if outputs.is_whole else factors.b[outputs.positions]
                parts.append(LoraPart(cut_rows[id(factors.a)], b.contiguous(), first))
            first += outputs.size
        if not parts:
            return None
        if self._native is None or memory is None:
            if self._device.type == "cuda":  # pinned, so that copies to the device are asynchronous
                parts = [LoraPart(part.a.pin_memory(), part.b.pin_memory(), part.first_output) for part in parts]
            return SiteFactors(self.site.form, parts, self._linear)
        return self.packed(CpuLoraFactors(parts, memory))

    def packed(self, factors: CpuLoraFactors) -> SiteFactors:
        """Return factors that are packed for the CPU's kernel."""
        return SiteFactors(self.site.form, (), self._linear, factors)

    def set(self, slot: int, factors: SiteFactors | None) -> None:
        """Set the matrices of a slot from the next step on; None if the slot does not change this operation."""
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
        """Return the operation extended by the adapters, or `linear` if adapters may change none of its matrices."""
        if isinstance(linear, CpuLinear) and self._native is not None:
            return self._natively_extended(self._native, linear)
        if not any(map(self._is_changeable, self.site.outputs)):
            return linear
        adapted = _AdaptedOperation(linear, self._added)
        self._operations.append(adapted)
        return adapted

    def _shape(self, width: int) -> StackShape:
        """Return the shape of the parts that adapters may change.

        Args:
            width: outputs of a head; used for absorbed matrices only.
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
        """Use lora.cpp for the site if prepacking has turned all operations that were not a `CpuLinear` when they were
        extended into a `CpuLinear`; otherwise do not use it. Must be called after prepacking."""
        if self._native is None:
            return
        resolved = [resolve_prepack(adapted.linear) for adapted in self._operations]
        linears = [linear for linear in resolved if isinstance(linear, CpuLinear)]
        if len(linears) < len(resolved):
            self._native = None  # for example for a router, which computes in float32
            return
        for adapted, linear in zip(self._operations, linears, strict=True):
            adapted.operation = self._natively_extended(self._native, linear)

    def _natively_extended(self, native: CpuLoraSite, linear: CpuLinear) -> Operation:
        return native.extended(linear, lambda: self._rows[self.site.space])

    def _added(self, y: torch.Tensor, x: torch.Tensor) -> None:
        """Add the adapters' results for x to y, the operation's result."""
        if not self._rows.has_adapters:
            return
        if self._make_stacks is not None:
            # Allocated even if no adapter changes the operation yet, so that a captured CUDA graph also computes later
            # adapters. Experts with adapters are not in graphs; `set` allocates their stacks on demand.
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
    """An adapter's matrices for one operation on this rank.

    Args:
        parts: with LINEAR, one part for each merged matrix that the adapter changes; with other forms, a single part.
            Shapes are those of `Factors`, except that the embedding's A is [vocabulary, rank].
        linear: weight → linear operation.
        native: the parts in the layout of the CPU's kernel; `parts` is then empty. None: the kernel is not used.
    """

    def __init__(
        self, form: SiteForm, parts: Sequence[LoraPart], linear: MakeLinear, native: CpuLoraFactors | None = None
    ) -> None:
        self._form, self.parts, self._linear, self.native = form, parts, linear, native

    @functools.cached_property
    def operations(self) -> list[tuple[slice, Operation]]:
        """For each part: the slice of the result's dimension 1 (outputs or heads) that the part changes, and the
        operation whose result is added to that slice."""
        return [
            (
                slice(first, first + len(b)) if self._form is SiteForm.LINEAR else slice(None),
                _FORMS[self._form](a, b, self._linear),
            )
            for a, b, first in self.parts
        ]

    def on(self, device: torch.device) -> SiteFactors:
        """Return the factors on a device. Copies may still be in progress when it returns."""
        if device.type == "cpu":
            return self
        copies: dict[int, torch.Tensor] = {}
        for tensor in (each for part in self.parts for each in (part.a, part.b)):
            copies[id(tensor)] = tensor.to(device, non_blocking=True)
        parts = [LoraPart(copies[id(a)], copies[id(b)], first) for a, b, first in self.parts]
        return SiteFactors(self._form, parts, self._linear)

    @property
    def width(self) -> int:
        """Number of outputs of a head, for absorbed matrices."""
        a, b, _ = self.parts[0]
        return a.shape[1] if self._form is SiteForm.ABSORBED_KEYS else b.shape[-2]

    @property
    def num_bytes(self) -> int:
        """Size of the matrices in bytes."""
        tensors = {id(tensor): tensor for part in self.parts for tensor in (part.a, part.b)}
        return sum(tensor.nbytes for tensor in tensors.values()) + (self.native.num_bytes if self.native else 0)


class _AdaptedOperation:
    """A linear operation with the adapters' results added.

    Attributes:
        operation: replacement that the CPU's kernel computes; None: there is none.
    """

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
    """Return the columns of A for this rank's inputs, for LINEAR; otherwise all of A, transposed for the embedding, so
    that tokens are rows."""
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
    """Return the operation [rows, heads, keys] → [rows, heads, latent]."""
    heads, expand = by_head([linear(head.T.contiguous()) for head in b]), linear(a.T.contiguous())
    return lambda query: expand(heads(query.to(a.dtype)))


def _absorbed_values(a: torch.Tensor, b: torch.Tensor, linear: MakeLinear) -> Operation:
    """Return the operation [rows, heads, latent] → [rows, heads, values]."""
    shrink, heads = linear(a), by_head([linear(head) for head in b])
    return lambda latents: heads(shrink(latents.to(a.dtype)))


_FORMS: Mapping[SiteForm, Callable[[torch.Tensor, torch.Tensor, MakeLinear], Operation]] = {
    SiteForm.LINEAR: _linear,
    SiteForm.EMBEDDING: _embedding,
    SiteForm.ABSORBED_KEYS: _absorbed_keys,
    SiteForm.ABSORBED_VALUES: _absorbed_values,
}
