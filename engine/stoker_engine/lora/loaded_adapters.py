"""The adapters in the memory of one rank, and in its slots.

load       reads and checks an adapter's files, and cuts this rank's part; in a thread, while steps run
activate   assigns a loaded adapter to a slot; between two steps
drop       frees an adapter's memory, also if it is in a slot; after all steps that use it
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch

from stoker_common.errors import AdapterError
from stoker_engine.core.adapter import AdapterSource, LoadedAdapter
from stoker_engine.kernels.bundle import Operation
from stoker_engine.kernels.cpu.lora import AdapterMemory, CpuLoraTable, PackedLayout
from stoker_engine.layers.batch_rows import BatchRows, RowSpace
from stoker_engine.layers.linear_site import LinearSite
from stoker_engine.lora.adapter_layout import MAX_LAYOUTS
from stoker_engine.lora.adapter_reader import AdapterReader, OpenedAdapter
from stoker_engine.lora.extension import AdaptedSite, SiteFactors
from stoker_engine.lora.pace import Pace
from stoker_engine.lora.slot_stacks import GroupedAdapters, SlotStacks

#: Identifies a site by the names of its parameters.
_SiteKey = tuple[str, ...]


class LoadedAdapters:
    """The adapters of one rank.

    Args:
        dtype: dtype of the adapters' matrices and of the model's activations.
        num_slots: maximum number of adapters in a step.
        device: device of the model.
        library: library of the CPU kernels; None if they do not compute the model.
        grouped: kernels for all rows at once; None if Triton does not compute the model.
    """

    def __init__(
        self,
        reader: AdapterReader,
        dtype: torch.dtype,
        num_slots: int,
        device: torch.device,
        library: ctypes.CDLL | None,
        grouped: GroupedAdapters | None = None,
    ) -> None:
        self._grouped, self._num_slots = grouped, num_slots
        self._reader, self._dtype, self._device, self._library = reader, dtype, device, library
        self._table = CpuLoraTable(num_slots) if library is not None else None
        self._sites: dict[_SiteKey, AdaptedSite] = {}
        self._layouts: OrderedDict[bytes, PackedLayout[_SiteKey]] = OrderedDict()
        self._loaded: dict[int, Mapping[_SiteKey, SiteFactors]] = {}
        self._active: dict[int, int] = {}  # slot → number of the adapter
        self._in_slots: dict[int, Mapping[_SiteKey, SiteFactors]] = {}
        self._rows: BatchRows | None = None
        self._loading = threading.Lock()

    def extend(self, linear: Operation, site: LinearSite, rows: BatchRows) -> Operation:
        """See `ExtendLinear`."""
        key = tuple(site.outputs)
        if key not in self._sites:
            self._sites[key] = self._site(site, rows)
        return self._sites[key].extended(linear)

    def _site(self, site: LinearSite, rows: BatchRows) -> AdaptedSite:
        grouped = self._grouped
        if grouped is None:
            return AdaptedSite(site, rows, self._device, self._table, self._library)
        make_stacks = partial(
            SlotStacks, grouped=grouped, num_slots=self._num_slots, dtype=self._dtype, device=self._device
        )
        return AdaptedSite(site, rows, self._device, None, None, make_stacks, grouped.is_changeable)

    def settle(self, rows: BatchRows) -> None:
        """Prepare for steps, after the model is loaded and `rows` has the slots of the batch's rows."""
        self._rows = rows
        self._update_rows()
        if self._table is not None:
            self._table.read_from(rows.adapters)
        for site in self._sites.values():
            site.settle()

    def load(self, source: AdapterSource) -> LoadedAdapter:
        """Load an adapter. Steps may run meanwhile.

        Raises:
            AdapterError: the files cannot be read, do not fit the model, or do not match `source`.
        """
        started = time.monotonic()
        with self._loading, torch.inference_mode():
            pace = Pace()
            opened = self._reader.open(Path(source.path), pace)
            if source.digest not in ("", opened.digest):
                raise AdapterError(f"the files in {source.path} have changed since adapter {source.name} was loaded")
            factors = self._packed_again(opened, pace) or self._cut(opened, pace)
            self._loaded[source.number] = factors
        num_bytes = sum(each.num_bytes for each in factors.values())
        return LoadedAdapter(opened.digest, opened.rank, num_bytes, time.monotonic() - started)

    def _packed_again(self, opened: OpenedAdapter, pace: Pace) -> dict[_SiteKey, SiteFactors] | None:
        """Return the adapter's factors, packed like those of an earlier adapter of the same layout; None if no such
        packing is remembered, or if `opened` is not plain."""
        if not opened.is_plain or (layout := self._layouts.get(opened.key)) is None:
            return None
        self._layouts.move_to_end(opened.key)
        memory, packed = layout.of(opened.files.tensors)
        memory.fill(pace.give_way)
        return {key: self._sites[key].packed(factors) for key, factors in packed.items()}

    def _cut(self, opened: OpenedAdapter, pace: Pace) -> dict[_SiteKey, SiteFactors]:
        """Return the adapter's factors, cut for this rank."""
        adapter = self._reader.adapter(opened, pace)
        memory = None if self._library is None else AdapterMemory(self._library, self._dtype)
        cut = dict[_SiteKey, SiteFactors]()
        for key, site in self._sites.items():
            if (factors := site.cut(adapter, memory)) is not None:
                cut[key] = factors
                pace.give_way()
        if memory is None:
            return cut
        packed = {key: factors.native for key, factors in cut.items() if factors.native is not None}
        if opened.is_plain and len(packed) == len(cut) and memory.is_within(opened.files.tensors):
            self._layouts[opened.key] = PackedLayout(memory, packed, opened.files.tensors)
            if len(self._layouts) > MAX_LAYOUTS:
                self._layouts.popitem(last=False)
        memory.fill(pace.give_way)
        return cut

    def drop(self, number: int) -> None:
        """Free an adapter's memory. Must not be called while a step runs. Unknown numbers are ignored."""
        for slot in [slot for slot, active in self._active.items() if active == number]:
            self._set(slot, {})
            del self._active[slot]
        self._loaded.pop(number, None)

    def activate(self, slot: int, number: int) -> None:
        """Assign a loaded adapter to a slot, from the next step on."""
        self._set(slot, self._loaded[number])
        self._active[slot] = number

    def _set(self, slot: int, factors: Mapping[_SiteKey, SiteFactors]) -> None:
        before = self._in_slots.get(slot, {})
        for key in before.keys() | factors.keys():
            self._sites[key].set(slot, factors.get(key))
        self._in_slots[slot] = factors
        self._update_rows()

    def _update_rows(self) -> None:
        """Set `BatchRows.extends_experts`: experts are computed one by one while an adapter in a slot changes experts.
        With `is_batch_invariant`, this holds whenever adapters may change experts."""
        assert self._rows is not None
        changed = {key for each in self._in_slots.values() for key in each}
        if self._grouped is not None and self._grouped.is_batch_invariant:
            changed = {key for key in self._sites if any(map(self._grouped.is_changeable, key))}
        self._rows.extends_experts = any(self._sites[key].site.space is RowSpace.EXPERTS for key in changed)
